"""What several techniques have in common."""
