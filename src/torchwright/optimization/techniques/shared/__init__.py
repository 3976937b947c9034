"""Code that several techniques share."""
