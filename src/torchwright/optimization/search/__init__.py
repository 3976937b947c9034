"""The search: what is tried, what is kept, and what ships."""
