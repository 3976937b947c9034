"""A device in a package of its own: the GPU of an Apple computer, as PyTorch's `mps`."""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F

from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices.base import Ceilings, Device, fast_seconds

READ_BYTES = 1 << 30
SQUARE = 4096
"""Side of the matrices whose product is timed."""


class MPS(Device):
    """The GPU of an Apple computer. PyTorch calls it `mps`, so the device is called that too."""

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
            memory_bytes=torch.mps.recommended_max_memory(),
        )

    def measure(self) -> Ceilings:
        with torch.inference_mode():
            return Ceilings(read_gb_per_s=self._read_bandwidth() / 1e9, tflops=self._matmul_tflops())

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def reset_peak_memory(self) -> bool:
        return False  # Metal has no counter of the peak: what the driver holds grows only, and stands for it

    def peak_memory_bytes(self) -> int:
        return torch.mps.driver_allocated_memory()

    def _read_bandwidth(self) -> float:
        x = torch.ones(READ_BYTES // 4, device=self.name)
        return READ_BYTES / fast_seconds(x.sum, budget=0.5, synchronize=self.synchronize)

    def _matmul_tflops(self) -> dict[str, float]:
        rates: dict[str, float] = {}
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = torch.randn(SQUARE, SQUARE, device=self.name, dtype=dtype)
            seconds = fast_seconds(lambda x=x: F.linear(x, x), budget=0.4, synchronize=self.synchronize)
            rates[str(dtype).removeprefix("torch.")] = 2 * SQUARE**3 / seconds / 1e12
        return rates
