"""Shapes and types of what the operators return, so that torch.compile and torch.export see through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchwright.hardware.kernels.conv import out_shape

NAMESPACE = "torchwright"


Fake = Callable[..., Any]


def _linear(place: int) -> Fake:
    """Return the fake of a linear layer whose argument `place` is the number of its outputs."""
    return lambda x, *args: x.new_empty((*x.shape[:-1], args[place - 1]))


def _like(x: torch.Tensor, *args: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def register(namespace: str = NAMESPACE) -> None:
    """Give every operator of a loaded library its fake implementation."""
    for name, function in {**FAKES, **(CPU_FAKES if namespace == NAMESPACE else {})}.items():
        torch.library.register_fake(f"{namespace}::{name}", function)


def attention(q: torch.Tensor, *args: Any) -> torch.Tensor:
    B, H, T, D = q.shape
    return q.new_empty((B, T, H, D)).transpose(1, 2)


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


def lstm_layer(
    gates: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, cell: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = gates.new_empty((*gates.shape[:-1], state.shape[1]))
    return out, state.new_empty(state.shape), cell.new_empty(cell.shape)


def gru_layer(
    gates: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return gates.new_empty((*gates.shape[:-1], state.shape[1])), state.new_empty(state.shape)


def image_mean(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:2], 1, 1))


def add_rms_norm(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, centered: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = x.numel() // x.shape[-1]
    mean, inverse = (x.new_empty(count, dtype=torch.float32) for count in (rows if centered else 0, rows))
    return x.new_empty(x.shape), mean, inverse


def norm_backward(
    grad: torch.Tensor, x: torch.Tensor, mean: Any, inverse: Any, weight: Any, wanted: list[bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sums = [x.new_empty(x.shape[-1] if asked else 0, dtype=torch.float32) for asked in wanted[1:]]
    return x.new_empty(x.shape if wanted[0] else 0), sums[0], sums[1]


def gated(x: torch.Tensor, kind: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def rope_store(qkv: torch.Tensor, *args: Any) -> torch.Tensor:
    heads, kv_heads = args[8:10]
    return qkv.new_empty((qkv.shape[0], heads, qkv.shape[1] // (heads + 2 * kv_heads)))


def route(
    score: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor | None, chosen: int, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = score.shape[0], chosen
    return score.new_empty(shape, dtype=torch.int64), score.new_empty(shape, dtype=torch.float32)


def like_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> torch.Tensor:
    return v.new_empty(v.shape)


def varlen_attention(qkv: torch.Tensor, *args: Any) -> torch.Tensor:
    return qkv.new_empty((qkv.shape[0], qkv.shape[1] // 3))


def quantize_w4(
    weight: torch.Tensor, importance: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, features = weight.shape
    return (
        weight.new_empty((rows, features), dtype=torch.int8),
        weight.new_empty((rows, features // group_size), dtype=torch.int8),
        weight.new_empty((rows,)),
    )


FAKES: dict[str, Fake] = {
    "linear_w8a8": _linear(4),
    "linear_w4a8": _linear(4),
    "linear_w4a16": _linear(4),
    "linear_bf16": _linear(3),
    "rms_norm": _like,
    "add_rms_norm": add_rms_norm,
    "norm": norm,
    "norm_backward": norm_backward,
    "gated": gated,
    "rope_store": rope_store,
    "paged_attention": _like,
    "grid_attention": attention,
}
CPU_FAKES: dict[str, Fake] = {
    "quantize_w4": quantize_w4,
    "linear_grouped": _linear(3),
    "linear_heads": _linear(2),
    "linear_w8a8_fused": _linear(5),
    "activate": _like,
    "route": route,
    "attention": attention,
    "varlen_attention": varlen_attention,
    "conv_dense": conv_dense,
    "conv_depthwise": conv_depthwise,
    "image_mean": image_mean,
    "short_conv": _like,
    "gated_delta": like_values,
    "selective_scan": like_values,
    "gated_norm": _like,
    "lstm_layer": lstm_layer,
    "gru_layer": gru_layer,
}
"""Operators that the CPU alone has."""
