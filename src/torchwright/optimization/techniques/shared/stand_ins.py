# pyright: basic, reportPrivateImportUsage=false
"""Functions that rewritten lines call in place of the code that broke the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _numpy as arrays
from torch.utils import _pytree as pytree


class Unlike(TypeError):
    """Two sides of a branch give what no tensor can be chosen from."""


def choose(condition: Any, then: Callable[..., Any], other: Callable[..., Any], *values: Any) -> Any:
    """`then(*values) if condition else other(*values)`; of a tensor's condition both, chosen from by torch.where."""
    if not isinstance(condition, torch.Tensor):
        return then(*values) if condition else other(*values)
    if condition.numel() != 1:
        raise Unlike(f"a condition of {condition.numel()} values")
    condition = condition.reshape(()) != 0
    (left, spec), (right, other_spec) = (
        pytree.tree_flatten(then(*values)),
        pytree.tree_flatten(other(*values)),
    )
    if spec != other_spec:
        raise Unlike(f"one side gives {spec}, the other {other_spec}")
    chosen = [_chosen(condition, a, b) for a, b in zip(left, right, strict=True)]
    return pytree.tree_unflatten(chosen, spec)


def _chosen(condition: torch.Tensor, a: Any, b: Any) -> Any:
    if a is b:
        return a
    if type(a) is float and type(b) is float:
        return torch.where(condition, a, b)
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        if type(a) is type(b) and a == b:
            return a
        raise Unlike(f"one side gives {_kind(a)}, the other {_kind(b)}")
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        raise Unlike(f"one side gives {_kind(a)}, the other {_kind(b)}")
    return torch.where(condition, a, b)


def item(value: Any) -> Any:
    """`value.item()` as a tensor of no dimensions, which types of results heed as little as they do a number."""
    return value.reshape(()) if isinstance(value, torch.Tensor) else value.item()


def to_float(value: Any) -> Any:
    """`float(value)`, likewise."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    value = value.reshape(())
    return value if value.is_floating_point() else value.to(torch.get_default_dtype())


def to_int(value: Any) -> Any:
    """`int(value)`, likewise."""
    return value.reshape(()).to(torch.int64) if isinstance(value, torch.Tensor) else int(value)


def largest(*values: Any) -> Any:
    """`max(a, b, …)`: the first where none is larger, as Python has it, so that NaN is treated alike."""
    return _extreme(values, torch.gt, max)


def smallest(*values: Any) -> Any:
    """`min(a, b, …)`."""
    return _extreme(values, torch.lt, min)


def _extreme(values: tuple[Any, ...], beats: Callable[..., torch.Tensor], plain: Callable[..., Any]) -> Any:
    example = next((value for value in values if isinstance(value, torch.Tensor)), None)
    if example is None or len(values) == 1:
        return plain(*values)
    best, *others = (torch.as_tensor(value, device=example.device) for value in values)
    for value in others:
        best = torch.where(beats(value, best), value, best)
    return best


def to_array(value: Any) -> Any:
    """`value.numpy()` as one of torch's own arrays, which are tensors with NumPy's names."""
    return arrays.ndarray(value) if isinstance(value, torch.Tensor) else value.numpy()


def from_array(function: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
    """`function(value)` of torch's that makes a tensor of an array."""
    if not isinstance(value, arrays.ndarray):
        return function(value, *args, **kwargs)
    tensor = value.tensor
    if function is torch.tensor:
        return torch.as_tensor(tensor.clone(), *args, **kwargs)
    if function is torch.Tensor:
        return tensor.to(torch.get_default_dtype())
    return tensor if function is torch.from_numpy else torch.as_tensor(tensor, *args, **kwargs)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}".removeprefix("torch.")
    return type(value).__name__
