"""MPS: the GPUs of Apple's computers, through Metal. Nobody has run it here."""

from __future__ import annotations

import platform

import torch

from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices.accelerator import Accelerator


class MPS(Accelerator):
    """The GPU of an Apple computer."""

    name = "mps"
    remedy = "run it on an Apple computer with an M-series processor, or use --device cpu"

    @classmethod
    def unavailable(cls) -> str | None:
        if not torch.backends.mps.is_built():
            return f"PyTorch {torch.__version__} is built without Metal (mps)"
        if not torch.backends.mps.is_available():
            return "this machine has no GPU that Metal (mps) can use"
        return None

    def identify(self) -> DeviceFacts:
        return DeviceFacts(
            kind=self.name,
            name=f"{platform.processor() or platform.machine()} GPU",
            memory_bytes=self.module().recommended_max_memory(),
        )

    def reset_peak_memory(self) -> bool:
        return False  # Metal has no counter of the peak: what the driver holds grows only, and stands for it

    def peak_memory_bytes(self) -> int:
        return int(self.module().driver_allocated_memory())

    def free_memory_bytes(self) -> int:
        return int(self.module().recommended_max_memory()) - self.peak_memory_bytes()
