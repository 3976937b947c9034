"""Measuring: paired timing, operations and bytes against the roofline, micro-benchmarks of kernels."""
