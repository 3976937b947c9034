"""Benchmarks of export targets."""
