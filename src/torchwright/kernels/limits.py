"""What the kernels take at most; those in C++ have the same numbers of their own (`csrc/kernels.h`, `ops.cpp`)."""

LANES = 16
"""Head sizes that are no multiple of it are rare enough to be left to `reference` on a CPU."""
LARGEST_HEAD = 512
"""Elements of an attention head."""
LONGEST = 65536
"""Input features of which an int32 holds the sum of products."""
