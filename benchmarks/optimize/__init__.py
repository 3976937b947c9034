"""Benchmarks of optimized modules and of the search."""
