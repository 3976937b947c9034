"""Benchmarks: a script for each claim of the README and the docs, by area, on one shared harness.

Run them from the root of the repository, as modules: `python -m benchmarks.optimize.ladder --help`.
"""
