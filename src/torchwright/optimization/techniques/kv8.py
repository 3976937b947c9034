"""8-bit keys and values in the native decoder's cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torchwright.core.records import DeviceFacts
from torchwright.hardware.kernels import ops
from torchwright.optimization.techniques.base import Phase, Target, Technique


@dataclass(frozen=True, kw_only=True)
class KV8(Technique):
    """Native decoder: cached keys and values in 8 bits, one scale for each token and head."""

    name: ClassVar[str] = "kv8"
    phase: ClassVar[Phase] = Phase.CACHE
    needs: ClassVar[frozenset[str]] = frozenset({"decoder", "wide_cache"})
    removes: ClassVar[frozenset[str]] = frozenset({"wide_cache"})

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return ops.fault(device.kind)

    def apply(self, target: Target) -> None:
        model: Any = target.model
        model.loaded.kv_dtype = torch.int8
        layers = len(model.decoder.layers)
        self.cover(target, layers, unit="caches", kernel="int8 pages")
