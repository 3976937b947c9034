"""Metrics of a run, and the pages and terminals that show them."""
