"""Rewrites of exported graphs that compilers and other libraries need."""
