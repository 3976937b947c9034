"""Checks of the operators' arguments before a kernel touches memory.

Shapes, types, contiguity and devices are checked here. The kernels check numbers on the device (pages, slots,
positions): they read and write nothing for one that is out of range.
"""

from __future__ import annotations

import torch

from torchwright.core.scheme import GROUPS
from torchwright.hardware.kernels.limits import LARGEST_HEAD_OF_GPUS
from torchwright.hardware.kernels.pack import PANEL, padded_depth
from torchwright.hardware.kernels.reference import PAGE

FLOATS = (torch.float32, torch.bfloat16)
PAGE_TYPES = (*FLOATS, torch.int8)


def floats(x: torch.Tensor, name: str) -> None:
    """Rows of float32 or bfloat16."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} is {x.dtype}; float32 or bfloat16 is wanted")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"{name} of shape {list(x.shape)} has no features")


def vector(
    tensor: torch.Tensor | None, count: int, name: str, like: torch.Tensor, dtype: torch.dtype = torch.float32
) -> None:
    """`count` numbers of one type, contiguous, on the device of `like`; None passes."""
    if tensor is None:
        return
    if tensor.dtype != dtype or tensor.numel() != count or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be {count} contiguous numbers of {dtype}; found {list(tensor.shape)} of {tensor.dtype}"
        )
    if tensor.device != like.device:
        raise ValueError(f"{name} lies on {tensor.device}, not on {like.device}")


def group(size: int) -> None:
    if size not in GROUPS:
        raise ValueError(f"group_size is {size}; 32, 64 or 128 is wanted")


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    features: int,
    bits: int,
    group: int,
) -> None:
    """Check a packed weight of `features` output features against x; `group` is 0 for weights without groups."""
    floats(x, "x")
    if features < 1:
        raise ValueError(f"features is {features}; a positive number is wanted")
    width = x.shape[-1]
    rows = -(-features // PANEL) * PANEL
    elements = rows * padded_depth(width, group)
    count = elements // 2 + elements // group if group else elements * bits // 8
    vector(weight, count, "weight", x, torch.uint8)
    vector(scale, rows, "scale", x)
    vector(bias, features, "bias", x)


def pages(
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    like: torch.Tensor,
) -> tuple[int, int]:
    """(heads, head size) of pages k (P, K, D, 16) and v (P, K, 16, D)."""
    if k.dtype not in PAGE_TYPES:
        raise TypeError(f"k_pages is {k.dtype}; float32, bfloat16 or int8 is wanted")
    if k.dim() != 4 or k.shape[3] != PAGE or v.shape != k.transpose(2, 3).shape or v.dtype != k.dtype:
        raise ValueError(
            f"k_pages and v_pages must be (P, K, D, {PAGE}) and (P, K, {PAGE}, D) of one type; "
            f"found {list(k.shape)} and {list(v.shape)}"
        )
    if not (k.is_contiguous() and v.is_contiguous()) or k.device != like.device or v.device != like.device:
        raise ValueError(f"k_pages and v_pages must be contiguous on {like.device}")
    count, heads, size = k.shape[:3]
    if not 0 < size <= LARGEST_HEAD_OF_GPUS or not heads or not count:
        raise ValueError(f"k_pages of shape {list(k.shape)}: heads of 1 to {LARGEST_HEAD_OF_GPUS} are wanted")
    if k.dtype == torch.int8:
        if k_scale is None or v_scale is None:
            raise ValueError("pages of int8 need k_scale and v_scale")
        vector(k_scale, count * heads * PAGE, "k_scale", like)
        vector(v_scale, count * heads * PAGE, "v_scale", like)
    return heads, size
