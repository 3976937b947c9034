"""Kernels of the decoder: what each computes (`reference`), and the C++ that computes it fast."""
