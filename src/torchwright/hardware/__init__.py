"""The machine: its devices, the kernels that run on them, and how both are measured."""
