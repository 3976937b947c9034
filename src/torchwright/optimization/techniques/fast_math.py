"""float32 by oneDNN, in bfloat16 where the processor multiplies it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from torchwright.core.process.forks import reopen_in_child
from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices.cpu import onednn_computes
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.wrapping import named

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, kw_only=True)
class FastMath(Technique):
    """Have oneDNN multiply float32, rounding to bfloat16 in the matrix units that take it; weights stay float32."""

    # What DNNL_DEFAULT_FPMATH_MODE=BF16 asks of a whole process. PyTorch's matrix products leave MKL by it, which on
    # processors that are not Intel's is the slower of the two, even where oneDNN keeps float32 (AVX-512 without AMX).

    name: ClassVar[str] = "fast_math"
    phase: ClassVar[Phase] = Phase.DTYPE
    needs: ClassVar[frozenset[str]] = frozenset({"eager", "float32", "layers"})
    removes: ClassVar[frozenset[str]] = frozenset({"float32"})
    tolerance: ClassVar[float] = 3e-2

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        if device.kind != "cpu":
            return f"oneDNN multiplies on CPUs; this device is {device.kind}"
        if not torch.backends.mkldnn.is_available():
            return "this build of PyTorch has no oneDNN"
        if not onednn_computes("bfloat16"):
            return "oneDNN takes bfloat16 with AVX-512 or Arm's bf16 instructions alone, and this processor has neither"
        return None

    @property
    def epsilon(self) -> float:
        return torch.finfo(torch.bfloat16).eps / 2  # as autocast: sums, norms and activations stay in float32

    @property
    def expected_gain(self) -> float | None:
        return 1.1

    def apply(self, target: Target) -> None:
        layers = sum(1 for _ in named(target.model, LAYERS))
        target.model = FastFloat32(target.model)
        self.cover(target, layers, unit="layers", kernel="oneDNN's bf16 mode")


class FastFloat32(nn.Module):
    """Calls the inner module in oneDNN's bf16 mode; a compiler's output keeps the mode in which it is called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        with _MODE.fast():
            return self.inner(*args, **kwargs)


class _Mode:
    """oneDNN's mode, which is the whole process's: fast from the first caller's entry until the last one has left."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._before: list[str] = []
        reopen_in_child(self)

    def after_fork(self) -> None:
        """Leave the mode for callers that run in the parent's other threads."""
        self._lock = threading.Lock()
        if self._inside:
            self._inside = 0
            for setting, before in zip(_settings(), self._before, strict=True):
                setting.fp32_precision = before

    @contextmanager
    def fast(self) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._before = [setting.fp32_precision for setting in _settings()]
                for setting in _settings():
                    setting.fp32_precision = "bf16"
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    for setting, before in zip(_settings(), self._before, strict=True):
                        setting.fp32_precision = before


def _settings() -> tuple[Any, Any]:
    backend: Any = torch.backends.mkldnn
    return backend.matmul, backend.conv


_MODE = _Mode()
