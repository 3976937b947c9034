"""Shared code of techniques that run a transformers model on Torchwright's own layers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from torchwright.core.errors import ModelError
from torchwright.core.records import DeviceFacts
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.models.decoder import UnsupportedArchitecture
from torchwright.models.decoder.config import DecoderConfig
from torchwright.optimization.techniques.base import Phase, Target, Technique


@dataclass(frozen=True, kw_only=True)
class OwnLayers(Technique):
    """A model on Torchwright's own layers, run by the engine of the technique's name."""

    phase: ClassVar[Phase] = Phase.GRAPH
    own_kernels: ClassVar[bool] = True
    gives: ClassVar[frozenset[str]] = frozenset({"decoder", "wide_weights"})
    removes: ClassVar[frozenset[str]] = frozenset(
        ["eager", "exportable", "float32", "floating", "float_weights", "layers", "linear", "sdpa"]
    )
    tolerance: ClassVar[float] = 3e-2
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    """Those that have the kernels."""
    counted: ClassVar[tuple[type[nn.Module], ...]] = (PackedLinear,)
    """Modules that the report counts as layers."""

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        if device.kind not in cls.devices:
            return f"its kernels are for {' and '.join(cls.devices)}; this device is {device.kind}"
        return ops.fault(device.kind)

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def load(self, workload: Any, device: str) -> tuple[nn.Module, str]:
        """Return the model on our layers, and a description of its kernels."""
        raise NotImplementedError

    def apply(self, target: Target) -> None:
        # transformers' weights go before ours come: both together are more than a machine may hold.
        target.model = nn.Identity()
        gc.collect()
        target.model, kernel = self.load(target.workload, target.device.kind)
        target.compute_dtype = self.compute_dtype
        target.settings.engine = self.name
        layers = sum(isinstance(module, self.counted) for module in target.model.modules())
        self.cover(target, layers, unit="layers", kernel=kernel)


def decoder_refusal(read: Callable[[], DecoderConfig]) -> str | None:
    """Return the reason why a configuration has no native decoder whose artifacts can be loaded."""
    try:
        config = read()
    except (UnsupportedArchitecture, ModelError) as error:
        return error.reason
    return "its artifacts have no attention with sinks yet" if config.sinks else None
