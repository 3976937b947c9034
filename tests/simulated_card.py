"""CUDA on a card that is not there, with reference code in the place of its kernels.

with simulated_card(): ...

It is for code that asks for the device `cuda` by name. What runs on any device is tested on packages/sim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from simulated_tensors import Elsewhere, simulated
from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices.base import Ceilings
from torchwright.hardware.devices.cuda import CUDA
from torchwright.hardware.kernels import ops, reference
from torchwright.hardware.kernels.gpu import operators
from torchwright.hardware.kernels.linear import PackedLinear

OnCard = Elsewhere
CARD = torch.device("cuda", 0)
FREE = 1 << 24
"""Bytes that a server may take half of, and then has for real."""
FACTS = DeviceFacts(
    kind="cuda",
    name="a simulated card",
    isa=("sm_90",),
    cores=132,
    memory_bytes=80 << 30,
)


@contextlib.contextmanager
def simulated_card() -> Iterator[None]:
    """Inside, CUDA can be used; gradients cannot be taken."""
    on, forward = ops.on, PackedLinear.forward
    with pytest.MonkeyPatch.context() as patch, simulated(CARD):
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(CUDA, "unavailable", classmethod(lambda cls: None))
        patch.setattr(CUDA, "identify", lambda self: FACTS)
        patch.setattr(CUDA, "ceilings", lambda self, **options: Ceilings(read_gb_per_s=3000.0, tflops={}))
        patch.setattr(CUDA, "synchronize", lambda self: None)
        patch.setattr(CUDA, "reset_peak_memory", lambda self: True)
        patch.setattr(CUDA, "peak_memory_bytes", lambda self: 1 << 30)
        patch.setattr(CUDA, "free_memory_bytes", lambda self: FREE)
        patch.setattr(operators, "load_fault", lambda: None)
        patch.setattr(
            ops, "on", lambda device, *rest: reference if device.type == "cuda" else on(device, *rest)
        )
        patch.setattr(
            PackedLinear, "forward", lambda self, x: self.reference(x) if x.is_cuda else forward(self, x)
        )
        yield
