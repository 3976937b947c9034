"""The kernels for GPUs, in Triton: the same operators as the C++ for CPUs, under the namespace `torchwright_gpu`."""
