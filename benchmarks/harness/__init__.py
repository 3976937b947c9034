"""Shared parts of the benchmarks: options and rows, turns, contenders, peers."""
