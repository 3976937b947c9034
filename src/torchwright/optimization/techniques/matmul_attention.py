"""Attention by matrix products, where a CPU's fused half-precision kernel is slow.

torch's CPU flash attention in bfloat16 is tuned for processors with tile units; on AVX-512 ones its small tiles go
through a slow path. Two plain forms are quicker there: float32 for a single query (nothing to multiply, everything to
read), matrix products with a fused softmax for many.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.multihead import separate_heads
from torchwright.optimization.techniques.shared.wrapping import AttentionBy
from torchwright.optimization.techniques.shared.wrapping import fused_attention as fused


@dataclass(frozen=True, kw_only=True)
class MatmulAttention(Technique):
    """Half-precision attention as plain matrix products (prompts) and in float32 (single queries)."""

    name: ClassVar[str] = "matmul_attention"
    phase: ClassVar[Phase] = Phase.ATTENTION
    needs: ClassVar[frozenset[str]] = frozenset({"compiled", "half", "sdpa"})
    gives: ClassVar[frozenset[str]] = frozenset({"rewritten_attention"})

    longest: int = 512
    """Queries beyond this stay with the fused kernel: their scores would not fit the cache."""

    def refuse(self, target: Target) -> str | None:
        if target.device.kind != "cpu":
            return "the fused kernels of CUDA devices are the fast ones"
        half, full = _single_query_seconds(torch.bfloat16), _single_query_seconds(torch.float32)
        if half < 1.5 * full:
            return f"a single query takes {half * 1e6:.0f} us in bfloat16, {full * 1e6:.0f} us in float32: no slow path"
        return None

    def apply(self, target: Target) -> None:
        separate_heads(target.model)
        target.model = WithAttention(target.model, self.longest)
        self.cover(target, 1, unit="models", kernel="matrix products")


class WithAttention(nn.Module):
    """Runs the inner module with every scaled_dot_product_attention call replaced."""

    def __init__(self, inner: nn.Module, longest: int) -> None:
        super().__init__()
        self.inner, self.longest = inner, longest

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with AttentionBy(functools.partial(attend, self.longest)):
            return self.inner(*args, **kwargs)


def attend(
    longest: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Computes scaled_dot_product_attention, (B, H, T, D) in and out, without its fused kernel."""
    T, S = query.shape[-2], key.shape[-2]
    if query.dtype not in (torch.bfloat16, torch.float16) or dropout_p or longest < T or query.dim() != 4:
        return fused(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if T == 1:
        mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.float()

        return fused(query.float(), key.float(), value.float(), mask, 0.0, is_causal, scale=scale).to(
            query.dtype
        )
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if is_causal:
        attn_mask = torch.ones(T, S, dtype=torch.bool, device=query.device).tril()
    weights = scores.softmax(-1) if attn_mask is None else _masked_softmax(scores, attn_mask)
    return weights.to(query.dtype) @ value


def _masked_softmax(scores: torch.Tensor, attn_mask: torch.Tensor) -> torch.Tensor:
    """Match torch's own attention: a query that sees no key weighs all with 0, where a plain softmax gives NaN."""
    hidden = attn_mask.dtype == torch.bool
    scores = scores.masked_fill(~attn_mask, -math.inf) if hidden else scores + attn_mask.float()
    sees_none = scores.amax(-1, keepdim=True) == -math.inf
    return scores.softmax(-1).masked_fill(sees_none, 0.0)


class AttentionCalls(TorchFunctionMode):
    """Notes whether scaled_dot_product_attention is called while its block runs.

    What torch's own multi-head attention calls is not shown to a mode, so that its call counts where it asks for none
    of the weights.
    """

    seen = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        heads = func is nn.functional.multi_head_attention_forward and not kwargs.get("need_weights", True)
        self.seen = self.seen or func is fused or heads
        return func(*args, **kwargs)


@functools.cache
def _single_query_seconds(dtype: torch.dtype) -> float:
    q, k = torch.randn(1, 8, 1, 64, dtype=dtype), torch.randn(1, 8, 256, 64, dtype=dtype)
    times = []
    for _ in range(30):
        start = time.perf_counter()
        fused(q, k, k)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
