"""Tensor parallelism: several processes compute one decoder together, each on its part of the weights."""
