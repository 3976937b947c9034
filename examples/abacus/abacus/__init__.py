"""The abacus: a device that PyTorch does not know, brought by `abacus.backend` and described to Torchwright here.

    pip install examples/abacus && torchwright optimize MODEL --device abacus

A vendor's backend, such as torch_npu, takes the place of `abacus.backend`; the class below is all that Torchwright
needs besides.
"""

from __future__ import annotations

from torchwright.hardware.devices.accelerator import Accelerator


class Abacus(Accelerator):
    """A device of PyTorch's PrivateUse1: its tensors have storage of their own, and its operators run on the CPU."""

    name = "abacus"
    package = "abacus.backend"
    uncompiled = "no compiler makes code for an abacus"
    remedy = "install a C++ compiler, which builds the backend at its first import, or use --device cpu"
