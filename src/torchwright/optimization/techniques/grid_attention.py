"""Attention over a grid of places on Torchwright's own kernel, without its bias as a tensor.

SAM's encoder adds to a query's scores its products with a vector for each distance in rows and one for each in columns
(MViTv2). The bias of a picture's 64 x 64 places against each other takes 800 MB in float32 for 12 heads, written and
read once a layer; the kernel makes it for one query at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from torchwright.core.errors import RefusedTechnique
from torchwright.core.layer_types import attached
from torchwright.core.records import DeviceFacts
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.gpu import operators as gpu
from torchwright.hardware.kernels.limits import LANES, LARGEST_HEAD_OF_GPUS
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.wrapping import of_classes, replace_where

KNOWN = frozenset(
    f"transformers.models.{module}.{name}"
    for module, name in (
        ("sam.modeling_sam", "SamVisionAttention"),
        ("sam.modeling_sam", "SamVisionSdpaAttention"),
        ("sam_hq.modeling_sam_hq", "SamHQVisionAttention"),
        ("sam_hq.modeling_sam_hq", "SamHQVisionSdpaAttention"),
    )
)
"""Classes that compute this attention, all in the same way."""
DTYPES = (torch.float32, torch.bfloat16)
GAIN = 1.5
"""The least gain of its layers in float32 (docs/log.md, 23 November); in a SAM they are most of the encoder's time."""


@dataclass(frozen=True, kw_only=True)
class GridAttention(Technique):
    """Attention with decomposed relative positions (SAM's encoder) on a kernel that never writes the bias."""

    name: ClassVar[str] = "grid_attention"
    phase: ClassVar[Phase] = Phase.ATTENTION
    own_kernels: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"layers"})
    tolerance: ClassVar[float] = 3e-2

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        faults = {"cpu": build.load_fault, "cuda": gpu.load_fault}
        if device.kind not in faults:
            return "its kernels are for CPUs and CUDA"
        return faults[device.kind]()

    @property
    def expected_gain(self) -> float:
        return GAIN

    def refuse(self, target: Target) -> str | None:
        reasons = [_reason(module) for _, module in of_classes(target.model, KNOWN)]
        if not reasons:
            return "no attention of the model has relative positions in rows and columns"
        return None if None in reasons else "; ".join(sorted(set(map(str, reasons))))

    def apply(self, target: Target) -> None:
        if target.compute_dtype not in DTYPES:
            raise RefusedTechnique(
                "the kernel takes float32 and bfloat16",
                found=str(target.compute_dtype).removeprefix("torch."),
            )
        found = of_classes(target.model, KNOWN)
        left = replace_where(target.model, found, _reason, AttentionOverGrid)
        self.cover(
            target, len(found), unit="attention layers", kernel="scores and bias in the cache", skipped=left
        )


class AttentionOverGrid(nn.Module):
    """Computes transformers' SamVisionAttention: (B, Y, X, E) in and out."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.qkv, self.proj = original.qkv, original.proj
        self.rel_pos_h, self.rel_pos_w = original.rel_pos_h, original.rel_pos_w
        self.heads, self.scale = original.num_attention_heads, original.scale

    def forward(
        self, hidden_states: torch.Tensor, output_attentions: bool = False
    ) -> tuple[torch.Tensor, None]:
        B, Y, X, _ = hidden_states.shape
        q_BHTD, k_BHTD, v_BHTD = (
            self.qkv(hidden_states).reshape(B, Y * X, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        )
        ops: Any = torch.ops.torchwright_gpu if gpu.takes(q_BHTD.device) else torch.ops.torchwright
        y_BHTD = ops.grid_attention(q_BHTD, k_BHTD, v_BHTD, self.rel_pos_h, self.rel_pos_w, self.scale)
        return self.proj(y_BHTD.transpose(1, 2).reshape(B, Y, X, -1)), None


def _reason(module: Any) -> str | None:
    """Why the kernel does not take a layer, or None."""
    if not module.use_rel_pos:
        return "it knows no positions"
    size = module.rel_pos_h.shape[1]
    if size % LANES or size > LARGEST_HEAD_OF_GPUS:
        return f"heads of {size} features; multiples of {LANES} up to {LARGEST_HEAD_OF_GPUS} are taken"
    return attached(module)
