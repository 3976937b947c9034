"""The C++ kernels: how they are built, whose threads and which memory they use."""
