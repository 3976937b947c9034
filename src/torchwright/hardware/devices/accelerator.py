"""The base of accelerators other than CUDA, which PyTorch or another package brings under a name of their own."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from torchwright.core.errors import first_line
from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices.base import Ceilings, Device, fast_seconds

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Accelerator(Device):
    """A device whose module in torch (`torch.xpu`, `torch.npu`) has these functions of `torch.cuda`: is_available,
    get_device_name, mem_get_info, synchronize, reset_peak_memory_stats, max_memory_allocated.

    A subclass needs a name, and `package` where the backend is not PyTorch's own. It overrides what its module lacks.
    Techniques that have kernels for CPUs or CUDA refuse it in words; the others run on it as on any device.
    """

    preference: ClassVar[int] = -1
    """Taken by its name alone: nobody has measured here yet that it is the better choice."""
    package: ClassVar[str | None] = None
    """The package whose import brings the device to PyTorch; None for one of PyTorch's own."""
    read_bytes: ClassVar[int] = 1 << 30
    """Size of the array whose reading is timed; no cache may hold it."""
    square: ClassVar[int] = 4096
    """Side of the matrices whose product is timed: large enough to fill a card, small enough for an integrated one."""

    @classmethod
    def unavailable(cls) -> str | None:
        if fault := cls._import_fault() or cls.unbuilt():
            return fault
        module = cls.module()
        if module is None:
            return f"{cls._provider()} has no device '{cls.name}'"
        if not module.is_available():
            return f"{cls._provider()} is built for '{cls.name}', but no device or driver answers"
        return None

    @classmethod
    def unbuilt(cls) -> str | None:
        """Say why this build of PyTorch, or of the package, cannot have the device; None where it can."""
        return None

    @classmethod
    def start(cls) -> None:
        if cls.package is not None:
            importlib.import_module(cls.package)

    @classmethod
    def module(cls) -> Any:
        """Return `torch.<name>`, or None if nothing registered such a device."""
        return getattr(torch, cls.name, None)

    def identify(self) -> DeviceFacts:
        module = self.module()
        _, memory = module.mem_get_info()
        return DeviceFacts(kind=self.name, name=str(module.get_device_name()), memory_bytes=int(memory))

    def measure(self) -> Ceilings:
        with torch.inference_mode():
            return Ceilings(read_gb_per_s=self._read_bandwidth() / 1e9, tflops=self._matmul_tflops())

    def synchronize(self) -> None:
        self.module().synchronize()

    def reset_peak_memory(self) -> bool:
        self.module().reset_peak_memory_stats()
        return True

    def peak_memory_bytes(self) -> int:
        return int(self.module().max_memory_allocated())

    def free_memory_bytes(self) -> int:
        free, _ = self.module().mem_get_info()
        return int(free)

    def _read_bandwidth(self) -> float:
        size = min(self.read_bytes, self.free_memory_bytes() // 4)
        x = torch.ones(size // 4, device=self.name)
        return size / fast_seconds(x.sum, budget=0.5, synchronize=self.synchronize)

    def _matmul_tflops(self) -> dict[str, float]:
        rates: dict[str, float] = {}
        for dtype in DTYPES:
            try:
                x = torch.ones(self.square, self.square, dtype=dtype, device=self.name)
                seconds = fast_seconds(lambda x=x: F.linear(x, x), budget=0.4, synchronize=self.synchronize)
            except (RuntimeError, TypeError):  # a backend refuses a type that it does not have by either
                continue
            rates[str(dtype).removeprefix("torch.")] = 2 * self.square**3 / seconds / 1e12
        return rates

    @classmethod
    def _import_fault(cls) -> str | None:
        if cls.package is None:
            return None
        try:
            cls.start()
        except ModuleNotFoundError as error:
            if error.name is not None and f"{cls.package}.".startswith(f"{error.name}."):
                return f"{cls.package}, which brings '{cls.name}' to PyTorch, is not installed"
            return f"{cls.package} cannot be imported: {error}"
        except Exception as error:  # a missing driver or library, in whatever way the package says so
            return f"{cls.package} cannot be imported: {type(error).__name__}: {first_line(error)}"
        return None

    @classmethod
    def _provider(cls) -> str:
        return cls.package or f"PyTorch {torch.__version__}"
