"""The search: what is tried, and what is kept and why."""
