"""Attention with the CPU's fused kernel where the CPU takes that, so that results have the CPU's bits."""

from __future__ import annotations

from typing import Any

import torch

from torchwright_sim import operators

MATH, FLASH, OVERRIDEABLE = 0, 1, 4
"""Values of torch.nn.attention.SDPBackend: composed of operators, the CPU's fused kernel, another package's kernel."""

_aten: Any = torch.ops.aten


def register(aten: torch.library.Library) -> None:
    """Register the kernels that PyTorch leaves to a backend of another package."""
    aten.impl("_fused_sdp_choice", choice)
    aten.impl("_scaled_dot_product_fused_attention_overrideable", forward)
    aten.impl("_scaled_dot_product_fused_attention_overrideable_backward", backward)


def choice(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    """Choose as the CPU would."""
    if attn_mask is not None and attn_mask.requires_grad:
        return MATH
    found = operators.run(
        _aten._fused_sdp_choice.default,
        *(query, key, value, attn_mask, dropout_p, is_causal),
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return OVERRIDEABLE if found == FLASH else MATH


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute attention; what a card's kernels need besides is empty."""
    out, logsumexp = operators.run(
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        *(query, key, value, dropout_p, is_causal),
        attn_mask=attn_bias,
        scale=scale,
    )
    none = query.new_empty(0)
    seed = query.new_empty(0, dtype=torch.int64)
    return out, logsumexp, seed, seed, query.size(2), key.size(2), seed, seed, none


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    grad_input_mask: list[bool],
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute the gradients of `forward`; a mask that wants one is not taken there."""
    grads = operators.run(
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        *(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal),
        attn_mask=attn_bias,
        scale=scale,
    )
    return *grads, None
