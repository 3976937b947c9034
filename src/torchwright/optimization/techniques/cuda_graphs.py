"""CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchwright.core.records import DeviceFacts
from torchwright.optimization.techniques.base import Phase, Target, Technique

GAIN = 1.5
"""The gain where launching kernels takes longer than running them, as on a fast card in all but large models."""


@dataclass(frozen=True, kw_only=True)
class CudaGraphs(Technique):
    """Record the kernels of a call once and replay them with one launch."""

    name: ClassVar[str] = "cuda_graphs"
    phase: ClassVar[Phase] = Phase.RUNTIME
    needs: ClassVar[frozenset[str]] = frozenset({"compiled"})

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        if device.kind != "cuda":
            return f"only CUDA devices record graphs; this one is {device.kind}"
        return None

    @property
    def expected_gain(self) -> float:
        return GAIN

    def apply(self, target: Target) -> None:
        # torch records graphs around what torch.compile made, not around ahead-of-time packages.
        target.settings.engine = "jit"
        target.settings.mode = "reduce-overhead"
        self.cover(target, 1, unit="compilation", kernel="CUDA graphs of torch.compile")
