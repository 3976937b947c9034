"""Modules that benchmarks measure, with random weights."""
