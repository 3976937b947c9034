"""2:4 sparsity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from torchwright.errors import RefusedTechnique
from torchwright.facts import Coverage, DeviceFacts
from torchwright.techniques.base import Phase, Target, Technique
from torchwright.techniques.shared.wrapping import named

DTYPES = (torch.float16, torch.bfloat16)
ROWS, COLUMNS = 32, 64
"""torch's semi-structured kernels take weights whose sides are multiples of these (16-bit types, CUTLASS)."""


@dataclass(frozen=True, kw_only=True)
class Sparse24(Technique):
    """Keep the two largest of every four weights in large linear layers and multiply by sparse tensor cores."""

    name: ClassVar[str] = "sparse24"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    needs: ClassVar[frozenset[str]] = frozenset({"linear", "float_weights"})
    gives: ClassVar[frozenset[str]] = frozenset({"sparse24"})
    removes: ClassVar[frozenset[str]] = frozenset({"float_weights"})
    tolerance: ClassVar[float] = 0.8

    min_features: int = 512
    """Leave linear layers narrower than this alone."""

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        if device.kind != "cuda":
            return (
                f"torch.sparse has 2:4 kernels for CUDA only, none for {device.kind}, and no CPU instruction skips the "
                "zeros: the best case is 1.00x"
            )
        if torch.cuda.get_device_capability() < (8, 0):
            major, minor = torch.cuda.get_device_capability()
            return f"sparse tensor cores came with capability 8.0; this card has {major}.{minor}"
        return None

    def refuse(self, target: Target) -> str | None:
        reasons = [self._skip(layer, None) for _, layer in named(target.model, nn.Linear)]
        if all(reasons):
            return f"none of {len(reasons)} linear layers can be sparse: {'; '.join(sorted(set(map(str, reasons))))}"
        return None

    def apply(self, target: Target) -> None:
        layers = dict(named(target.model, nn.Linear))
        skipped = {}
        for name, layer in layers.items():
            reason = self._skip(layer, target.compute_dtype)
            if reason:
                skipped[name] = reason
                continue
            pruned = prune24(layer.weight.detach())
            layer.weight = nn.Parameter(torch.sparse.to_sparse_semi_structured(pruned), requires_grad=False)
        if len(skipped) == len(layers):
            raise RefusedTechnique(
                "sparse24 changes nothing here", found="; ".join(sorted(set(skipped.values())))
            )
        target.coverage.append(
            Coverage(
                technique=self.name,
                changed=len(layers) - len(skipped),
                total=len(layers),
                unit="linear layers",
                kernel="torch.sparse semi-structured",
                skipped=skipped,
            )
        )

    def _skip(self, layer: nn.Linear, dtype: torch.dtype | None) -> str | None:
        """Why this layer stays dense. Without `dtype` the layer's type is not judged: it may change before."""
        N, K = layer.weight.shape
        if min(N, K) < self.min_features:
            return f"narrower than {self.min_features} features"
        if N % ROWS or K % COLUMNS:
            return f"{N} × {K} is not a multiple of {ROWS} × {COLUMNS}"
        if dtype is not None and layer.weight.dtype not in DTYPES:
            return f"{str(layer.weight.dtype).removeprefix('torch.')} has no sparse kernel; float16 and bfloat16 do"
        return None


def prune24(w_NK: torch.Tensor) -> torch.Tensor:
    """`w_NK` with the two smallest of every four neighbours in a row set to zero."""
    groups = w_NK.reshape(-1, 4)
    keep = groups.abs().topk(2, dim=1).indices
    return torch.zeros_like(groups).scatter_(1, keep, groups.gather(1, keep)).reshape(w_NK.shape)
