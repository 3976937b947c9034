"""Tensors in place of arrays: the same memory under NumPy's name on the way in, and under torch's on the way out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchwright.core.errors import TorchwrightError
from torchwright.optimization.numpy.tree import leaves, map_leaves

ALLOWED = "dense tensors of the CPU, of a dtype that NumPy has, without requires_grad"


def has_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Check whether any argument is a tensor, including nested ones."""
    return any(isinstance(leaf, torch.Tensor) for _, leaf in leaves((args, kwargs)))


def as_arrays(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every tensor as an array over its memory, whatever its strides.

    Raises TorchwrightError for tensors of several devices, and for one that no array can stand for.
    """
    tensors = [leaf for _, leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise TorchwrightError(
            f"{name} was called with tensors on several devices",
            found=" and ".join(devices),
            allowed="one device",
            next="move them to one: x.to(device)",
        )
    for tensor in tensors:
        fault = _fault(tensor)
        if fault:
            raise TorchwrightError(f"{name} cannot take this tensor", found=fault, allowed=ALLOWED)

    def array(_: Any, leaf: Any) -> Any:
        return leaf.resolve_conj().resolve_neg().numpy() if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(args, array), map_leaves(kwargs, array)


def as_tensors(result: Any) -> Any:
    """A function's result with every array and NumPy scalar as a tensor over its memory; Python's values stay."""
    return map_leaves(result, lambda _, leaf: _tensor(leaf))


def _tensor(leaf: Any) -> Any:
    if isinstance(leaf, np.generic):
        leaf = np.asarray(leaf)
    if not isinstance(leaf, np.ndarray):
        return leaf
    if leaf.dtype.kind not in "biufc" or leaf.dtype.itemsize > (16 if leaf.dtype.kind == "c" else 8):
        raise TorchwrightError(
            "the function returns what no tensor can hold", found=f"an array of dtype {leaf.dtype}"
        )
    plain = leaf.flags.writeable and leaf.dtype.isnative
    plain = plain and all(stride >= 0 and stride % leaf.itemsize == 0 for stride in leaf.strides)
    return torch.from_numpy(leaf if plain else leaf.astype(leaf.dtype.newbyteorder("="), order="C"))


def _fault(tensor: torch.Tensor) -> str | None:
    """Why NumPy cannot see a tensor's memory, or None."""
    if tensor.device.type != "cpu":
        return f"it is on {tensor.device}, which NumPy's check cannot read"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.requires_grad:
        return "it requires grad, which NumPy's functions do not follow: x.detach()"
    if tensor.dtype in (torch.bfloat16, torch.complex32) or tensor.is_quantized:
        return f"NumPy has no {str(tensor.dtype).removeprefix('torch.')}"
    return None
