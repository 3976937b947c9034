"""Attention on Torchwright's own kernel: every query sees every key that its mask shows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import DeviceFacts
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.limits import LANES, LARGEST_HEAD
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.encoder_graph import drop_masks
from torchwright.optimization.techniques.shared.multihead import separate_heads
from torchwright.optimization.techniques.shared.wrapping import AttentionBy
from torchwright.optimization.techniques.shared.wrapping import fused_attention as fused


@dataclass(frozen=True, kw_only=True)
class DenseAttention(Technique):
    """Attention in bfloat16 on Torchwright's kernel, without its mask where that is constant and hides nothing."""

    name: ClassVar[str] = "dense_attention"
    phase: ClassVar[Phase] = Phase.ATTENTION
    own_kernels: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"compiled", "half", "sdpa"})
    gives: ClassVar[frozenset[str]] = frozenset({"rewritten_attention"})

    longest: int = 2048
    """Keys beyond this stay with torch's kernel: the scores of a few queries would not fit the cache."""

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return build.load_fault() if device.kind == "cpu" else "its kernel is for CPUs"

    def apply(self, target: Target) -> None:
        separate_heads(target.model)
        model = WithDenseAttention(target.model, self.longest)
        with torch.no_grad():
            for case in target.workload.cases(target.compute_dtype):
                model(*case.args, **case.kwargs)
        if not model.changed:
            raise RefusedTechnique(
                "no call of attention can go to Torchwright's kernel",
                found="; ".join(sorted(set(model.left.values()))) or "the model makes none",
            )
        target.model = model
        target.settings.rewrites.append(drop_masks)
        self.cover(
            target,
            model.changed + len(model.left),
            unit="calls of attention",
            kernel="bfloat16 products, scores in the cache",
            skipped={f"call {call}": reason for call, reason in model.left.items()},
        )


class WithDenseAttention(nn.Module):
    """Runs the inner module with its attention on our kernel where that takes it, and counts where."""

    def __init__(self, inner: nn.Module, longest: int) -> None:
        super().__init__()
        self.inner, self.longest = inner, longest
        self.changed = 0
        self.left: dict[int, str] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.changed, self.left = 0, {}
        with AttentionBy(self._attend):
            return self.inner(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        reason = refusal(query, key, value, self.longest)
        if dropout_p or is_causal:
            reason = "it drops out at random" if dropout_p else "it is causal"
        if reason:
            self.left[self.changed + len(self.left)] = reason
            return fused(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        self.changed += 1
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        attention: Any = torch.ops.torchwright.attention
        return attention(query, key, value, attn_mask, scale)


def refusal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, longest: int) -> str | None:
    """Why the kernel does not take these operands, or None."""
    if not query.dtype == key.dtype == value.dtype == torch.bfloat16:
        return f"its type is {query.dtype}"
    if query.dim() != 4 or key.shape != value.shape or query.shape[:2] != key.shape[:2]:
        return f"queries {tuple(query.shape)}, keys {tuple(key.shape)}, values {tuple(value.shape)}"
    if query.shape[-1] != key.shape[-1] or query.shape[-1] % LANES or query.shape[-1] > LARGEST_HEAD:
        return f"heads of {query.shape[-1]} features; multiples of {LANES} up to {LARGEST_HEAD} are taken"
    if key.shape[2] > longest:
        return f"it has {key.shape[2]} keys"
    return None
