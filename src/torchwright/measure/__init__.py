"""Measuring: paired timing, memory, accuracy, roofline, and micro-benchmarks of kernels."""
