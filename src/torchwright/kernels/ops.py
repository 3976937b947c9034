"""The kernels as the decoder calls them: the compiled operators where they can run, else what `reference` says.

Compiled: float32 and bfloat16 on a CPU. float64, other devices and machines without a C++ compiler take the plain
PyTorch of `reference`, with the same results within rounding.
"""

from __future__ import annotations

from typing import Any

import torch

from torchwright.kernels import build, reference

native: Any = torch.ops.torchwright
FAST = (torch.float32, torch.bfloat16)


def available() -> bool:
    """Whether the compiled kernels are there; the first call may compile them."""
    return build.load() is None


def fast(x: torch.Tensor) -> bool:
    """Whether the compiled kernels take this tensor."""
    return x.device.type == "cpu" and x.dtype in FAST and available()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `reference.rms_norm`."""
    return native.rms_norm(x, weight, eps) if fast(x) else reference.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.add_rms_norm`."""
    if fast(x):
        return native.add_rms_norm(x, residual, weight, eps)
    return reference.add_rms_norm(x, residual, weight, eps)


def gated(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """See `reference.gated`."""
    return native.gated(gate_up, kind) if fast(gate_up) else reference.gated(gate_up, kind)


def rope_store(qkv: torch.Tensor, *args: Any) -> torch.Tensor:
    """See `reference.rope_store`."""
    return native.rope_store(qkv, *args) if fast(qkv) else reference.rope_store(qkv, *args)


def paged_attention(q: torch.Tensor, *args: Any) -> torch.Tensor:
    """See `reference.paged_attention`."""
    return native.paged_attention(q, *args) if fast(q) else reference.paged_attention(q, *args)
