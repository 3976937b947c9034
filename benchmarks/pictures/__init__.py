"""Benchmarks of image models."""
