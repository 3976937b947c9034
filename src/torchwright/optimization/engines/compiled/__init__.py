"""Exported graphs, and the packages and caches that are compiled from them."""
