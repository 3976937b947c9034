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
LANES = 16
"""Head sizes that are no multiple of it are rare enough to be left to `reference`."""


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


def rope_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *args: Any,
) -> torch.Tensor:
    """See `reference.rope_store`."""
    kernels = (
        native if fast(qkv) and v_pages.shape[-2 if v_pages.dim() == 5 else -1] % LANES == 0 else reference
    )
    return kernels.rope_store(qkv, cos, sin, positions_T, slots_T, k_pages, v_pages, *args)


def paged_attention(q_THD: torch.Tensor, *args: Any) -> torch.Tensor:
    """See `reference.paged_attention`."""
    kernels = native if fast(q_THD) and q_THD.shape[-1] % LANES == 0 else reference
    return kernels.paged_attention(q_THD, *args)
