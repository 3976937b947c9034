"""Shapes and types of what the operators return, so that torch.compile and torch.export see through them."""

from __future__ import annotations

from typing import Any

import torch

from torchwright.hardware.kernels.conv import out_shape

NAMESPACE = "torchwright"


def register(namespace: str = NAMESPACE) -> None:
    """Give every operator of a loaded library its fake implementation."""
    only_cpu = (
        quantize_w4,
        linear_grouped,
        linear_w8a8_fused,
        activate,
        attention,
        conv_dense,
        conv_depthwise,
        image_mean,
    )
    only_here = only_cpu if namespace == NAMESPACE else ()
    for function in (
        *(linear_w8a8, linear_w4a8, linear_w4a16, linear_bf16),
        *(rms_norm, add_rms_norm, gated, rope_store, paged_attention, grid_attention, *only_here),
    ):
        torch.library.register_fake(f"{namespace}::{function.__name__}", function)


def linear_w8a8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, features: int
) -> torch.Tensor:
    return _linear(x, features)


def linear_w4a8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    features: int,
    group_size: int,
) -> torch.Tensor:
    return _linear(x, features)


def linear_w4a16(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    features: int,
    group_size: int,
) -> torch.Tensor:
    return _linear(x, features)


def linear_bf16(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, features: int
) -> torch.Tensor:
    return _linear(x, features)


def linear_grouped(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    features: int,
    group_size: int,
    bits: int,
) -> torch.Tensor:
    return _linear(x, features)


def linear_w8a8_fused(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    sums: torch.Tensor,
    bias: torch.Tensor | None,
    features: int,
    activation: str,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    return _linear(x, features)


def attention(q: torch.Tensor, *args: Any) -> torch.Tensor:
    B, H, T, D = q.shape
    return q.new_empty((B, T, H, D)).transpose(1, 2)


def grid_attention(q: torch.Tensor, *args: Any) -> torch.Tensor:
    return attention(q)


def conv_dense(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    features: int,
    activation: str,
    residual: torch.Tensor | None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    B, N, H, W = out_shape(x, window, stride, padding, features)
    return x.new_empty((B, H, W, N)).permute(0, 3, 1, 2)


def conv_depthwise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    activation: str,
) -> torch.Tensor:
    return conv_dense(x, weight, bias, window, stride, padding, x.shape[1], activation, None)


def image_mean(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:2], 1, 1))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def gated(x: torch.Tensor, kind: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def activate(x: torch.Tensor, kind: str) -> torch.Tensor:
    return x.new_empty(x.shape)


def rope_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    return qkv.new_empty((qkv.shape[0], heads, qkv.shape[1] // (heads + 2 * kv_heads)))


def paged_attention(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return q.new_empty(q.shape)


def _linear(x: torch.Tensor, features: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], features))


def quantize_w4(
    weight: torch.Tensor, importance: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, features = weight.shape
    return (
        weight.new_empty((rows, features), dtype=torch.int8),
        weight.new_empty((rows, features // group_size), dtype=torch.int8),
        weight.new_empty((rows,)),
    )
