"""Limits of the kernels; those in C++ repeat the same numbers (`csrc/kernels.h`, `ops.cpp`)."""

LANES = 16
"""Other head sizes than multiples of it are rare enough to be left to `reference` on a CPU."""
LARGEST_HEAD = 576
"""Elements of an attention head on a CPU: DeepSeek's latent vector and what turns."""
LARGEST_HEAD_OF_GPUS = 512
LONGEST = 65536
"""Input features of which an int32 holds the sum of products."""
