# pyright: basic
"""From the flat outputs of a compiled call to the result that the original gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

Builder = Callable[[list[Any]], Any]


def result_builder(spec: str | pytree.TreeSpec) -> Builder:
    """What makes a result of flat outputs; `spec` is pytree's, or its JSON.

    The usual forms (one tensor, a flat tuple, list or dict) take a fraction of a microsecond; pytree takes several.
    """
    tree = pytree.treespec_loads(spec) if isinstance(spec, str) else spec
    if tree.is_leaf():
        return lambda outputs: outputs[0]
    flat = all(child.is_leaf() for child in tree.children())
    if flat and tree.type is tuple:
        return tuple
    if flat and tree.type is list:
        return list
    if flat and tree.type is dict:
        names = list(tree.context)
        return lambda outputs: dict(zip(names, outputs, strict=True))
    return lambda outputs: pytree.tree_unflatten(outputs, tree)


def laid_out(build: Builder, layouts: Sequence[tuple[int, ...] | None]) -> Builder:
    """`build` with outputs brought into the layouts that are given: dimensions, the outermost in memory first."""
    if not any(layouts):
        return build

    def built(outputs: list[Any]) -> Any:
        return build([_laid_out(t, order) for t, order in zip(outputs, layouts, strict=True)])

    return built


def layout_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The order of a tensor's dimensions in memory, the outermost first; of equal strides the earlier one."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def _laid_out(tensor: Any, order: tuple[int, ...] | None) -> Any:
    if order is None:
        return tensor
    back = sorted(range(len(order)), key=lambda place: order[place])
    return tensor.permute(order).contiguous().permute(back)
