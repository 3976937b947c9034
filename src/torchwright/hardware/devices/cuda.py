"""CUDA: the card that torch calls the current one. Importing this file touches no driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F

from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices.base import Ceilings, Device, fast_seconds

GIB = 1 << 30
SQUARE = 8192
"""Side of the matrices whose product is timed: large enough to fill any card of today."""


class CUDA(Device):
    """The current CUDA device; PyTorch for ROCm calls an AMD card that, too."""

    name = "cuda"
    preference = 2
    remedy = (
        "install a driver and a CUDA build of PyTorch (https://pytorch.org/get-started), or use --device cpu"
    )

    @classmethod
    def unavailable(cls) -> str | None:
        if not torch.backends.cuda.is_built():
            return f"PyTorch {torch.__version__} is built without CUDA"
        if not torch.cuda.is_available():
            built = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
            return f"PyTorch {torch.__version__} is built for {built}, but no card or driver answers"
        return None

    def identify(self) -> DeviceFacts:
        properties = torch.cuda.get_device_properties()
        major, minor = torch.cuda.get_device_capability()
        # gfx942:sramecc+:xnack-: the architecture, and modes of the driver.
        amd = properties.gcnArchName.partition(":")[0] if torch.version.hip else None
        return DeviceFacts(
            kind="cuda",
            name=properties.name,
            isa=(amd or f"sm_{major}{minor}",),
            cores=properties.multi_processor_count,
            memory_bytes=properties.total_memory,
        )

    def measure(self) -> Ceilings:
        with torch.inference_mode():
            ceilings = Ceilings(
                read_gb_per_s=self._read_bandwidth(min(2 * GIB, self.free_memory_bytes() // 4)) / 1e9,
                tflops=self._matmul_tflops(),
            )
        torch.cuda.empty_cache()
        return ceilings

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def reset_peak_memory(self) -> bool:
        torch.cuda.reset_peak_memory_stats()
        return True

    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_reserved()

    def free_memory_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info()
        return free

    def _read_bandwidth(self, size: int) -> float:
        x = torch.ones(size // 4, device="cuda")
        return size / fast_seconds(x.sum, budget=0.5, synchronize=self.synchronize)

    def _matmul_tflops(self) -> dict[str, float]:
        operations = 2 * SQUARE**3

        def rate(call: Callable[[], object]) -> float:
            return operations / fast_seconds(call, budget=0.4, synchronize=self.synchronize) / 1e12

        rates: dict[str, float] = {}
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(SQUARE, SQUARE, device="cuda", dtype=dtype)
            rates[str(dtype).removeprefix("torch.")] = rate(lambda x=x: F.linear(x, x))
        x = torch.randint(-127, 127, (SQUARE, SQUARE), device="cuda", dtype=torch.int8)
        # Cards before sm_75 have no int8 tensor cores, and the operator says so by raising.
        with contextlib.suppress(RuntimeError):
            rates["int8"] = rate(lambda: torch.ops.aten._int_mm(x, x.t()))
        return rates
