"""2:4 sparsity, alone and on 8-bit integers."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import nn

from torchwright.core.errors import RefusedTechnique
from torchwright.core.layer_types import deviation
from torchwright.core.quiet import quiet_import
from torchwright.core.records import DeviceFacts
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.int8 import quantize_weight
from torchwright.optimization.techniques.shared.wrapping import linear_of, named, replace_module

DTYPES = (torch.float16, torch.bfloat16)
ROWS, COLUMNS = 32, 64
"""torch's semi-structured kernels take weights whose sides are multiples of these (16-bit types, CUTLASS)."""
DROPPED, GAIN = 0.36, 1.1
"""The expected error and gain. The two smallest of four normal weights carry 13% of the squares, and the error is the
root: a model that was not trained for it loses too much. Where it pays it gains 1.1x to 1.3x, including the work
around the products."""
CALL_ROWS = 16
"""cuSPARSELt multiplies 8-bit integers by multiples of this many rows."""


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
    bits: Literal[16, 8] = 16
    """8: kept weights are rounded to 8 bits, per-channel, and multiplied by 8-bit rows."""

    @property
    def epsilon(self) -> float:
        return DROPPED

    @property
    def expected_gain(self) -> float:
        return GAIN

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        if device.kind != "cuda":
            return (
                f"torch.sparse has 2:4 kernels for CUDA only, none for {device.kind}, and no CPU instruction skips the "
                "zeros, of 16 bits or 8: the best case is 1.00x"
            )
        if torch.cuda.get_device_capability() < (8, 0):
            major, minor = torch.cuda.get_device_capability()
            return f"sparse tensor cores came with capability 8.0; this card has {major}.{minor}"
        return None

    def variants(self, target: Target) -> Iterable[Self]:
        yield replace(self, bits=16)
        yield replace(self, bits=8)

    def refuse(self, target: Target) -> str | None:
        if self.bits == 8 and (fault := int8_fault()):
            return fault
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
            if self.bits == 8:
                replace_module(target.model, layer, SparseInt8Linear(pruned, layer.bias))
            else:
                with quiet_import():  # that it is a prototype
                    sparse = torch.sparse.to_sparse_semi_structured(pruned)
                replace_module(target.model, layer, linear_of(sparse, layer.bias))
        if len(skipped) == len(layers):
            raise RefusedTechnique(
                "sparse24 changes nothing here", found="; ".join(sorted(set(skipped.values())))
            )
        self.cover(
            target,
            len(layers),
            unit="linear layers",
            kernel="cuSPARSELt int8" if self.bits == 8 else "torch.sparse semi-structured",
            skipped=skipped,
        )

    def _skip(self, layer: nn.Linear, dtype: torch.dtype | None) -> str | None:
        """Why this layer stays dense. Without `dtype` the layer's type is not judged: it may change before."""
        N, K = layer.weight.shape
        if min(N, K) < self.min_features:
            return f"narrower than {self.min_features} features"
        if N % ROWS or K % COLUMNS:
            return f"{N} × {K} is not a multiple of {ROWS} × {COLUMNS}"
        if reason := deviation(layer, (nn.Linear,)):
            return reason
        if self.bits == 16 and dtype is not None and layer.weight.dtype not in DTYPES:
            return f"{str(layer.weight.dtype).removeprefix('torch.')} has no sparse kernel; float16 and bfloat16 do"
        return None


@functools.cache
def int8_fault() -> str | None:
    """Why this card and build of torch cannot multiply 8-bit 2:4 weights, or None: a small product is tried."""
    if not torch.cuda.is_available():
        return "8-bit 2:4 products are cuSPARSELt's, and there is no CUDA device"
    if not torch.backends.cusparselt.is_available():
        return "8-bit 2:4 products are cuSPARSELt's, and this build of torch has none"
    layer = SparseInt8Linear(prune24(torch.ones(ROWS, COLUMNS, device="cuda")), None)
    try:
        layer(torch.ones(1, COLUMNS, device="cuda", dtype=torch.bfloat16))
    except RuntimeError as error:
        return f"cuSPARSELt refuses an 8-bit 2:4 product on this card: {str(error).partition(' when ')[0]}"
    return None


def prune24(w_NK: torch.Tensor) -> torch.Tensor:
    """`w_NK` with the two smallest of every four neighbours in a row set to zero."""
    groups = w_NK.reshape(-1, 4)
    keep = groups.abs().topk(2, dim=1).indices
    return torch.zeros_like(groups).scatter_(1, keep, groups.gather(1, keep)).reshape(w_NK.shape)


class SparseInt8Linear(nn.Module):
    """y = x Wᵀ + b on a 2:4-sparse 8-bit W [N, K] and rows of x rounded to 8 bits each; y has x's type."""

    compressed: torch.Tensor
    scale: torch.Tensor

    def __init__(self, pruned_NK: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        integers, scale_N = quantize_weight(pruned_NK)
        self.out_features, self.in_features = pruned_NK.shape
        self.register_buffer("compressed", torch.ops.aten._cslt_compress(integers))
        self.register_buffer("scale", scale_N)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x_MK = input.reshape(-1, self.in_features).float()
        step_M1 = x_MK.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        # Row after row, whatever x was: cuSPARSELt takes no other layout of 8-bit integers.
        q_MK = (x_MK / step_M1).round().to(torch.int8, memory_format=torch.contiguous_format)
        q_MK = nn.functional.pad(q_MK, (0, 0, 0, -len(x_MK) % CALL_ROWS))
        y_NM = torch.ops.aten._cslt_sparse_mm(
            self.compressed, q_MK.t(), alpha=self.scale, out_dtype=torch.bfloat16
        )
        y_MN = y_NM.t()[: len(x_MK)] * step_M1
        y = y_MN.to(input.dtype).reshape(*input.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias
