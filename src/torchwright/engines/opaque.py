# pyright: basic
"""A compiled call as one operator, so that a model around it compiles without a graph break.

A tracer runs the model with tensors that have sizes and no data. It sees `torchwright_calls::call`, whose results'
sizes come from the call's specification; the door itself runs when the compiled model does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchwright.engines.door import Door, untraceable

_doors: weakref.WeakValueDictionary[int, Door] = weakref.WeakValueDictionary()
"""By `id`: an operator takes numbers and tensors only."""
_forms: dict[int, tuple[list[Any], Any]] = {}
"""Arguments as (leaves, with None for tensors; pytree's spec), by the number that the operator is given."""


def traced(door: Door) -> Callable[[Any, Any], Any]:
    """What a tracer is given for `door(*args, **kwargs)`."""
    _operator()
    _doors[id(door)] = door

    @torch._dynamo.nonstrict_trace
    def call(args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            raise untraceable("torch.export")
        found = door.result_of(args, kwargs)
        if found is None:
            return door.by_original(args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        form = len(_forms)
        _forms[form] = ([None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves], spec)
        build, _ = found
        return build(torch.ops.torchwright_calls.call(tensors, id(door), form))

    return call


@functools.cache
def _operator() -> None:
    """Register the operator; not at import, which nothing is done at."""

    @torch.library.custom_op("torchwright_calls::call", mutates_args=())
    def call(tensors: list[torch.Tensor], door: int, form: int) -> list[torch.Tensor]:
        args, kwargs = _arguments(tensors, form)
        given = {tensor.data_ptr() for tensor in tensors}
        results = pytree.tree_leaves(_doors[door](*args, **kwargs))
        # An operator's results are its own: what the model passes through is copied.
        return [t.clone() if t.data_ptr() in given else t for t in results if isinstance(t, torch.Tensor)]

    @call.register_fake
    def _(tensors: list[torch.Tensor], door: int, form: int) -> list[torch.Tensor]:
        args, kwargs = _arguments(tensors, form)
        found = _doors[door].result_of(args, kwargs)
        assert found is not None
        return [tensors[0].new_empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in found[1]]


def _arguments(tensors: list[torch.Tensor], form: int) -> Any:
    leaves, spec = _forms[form]
    remaining = iter(tensors)
    return pytree.tree_unflatten([next(remaining) if leaf is None else leaf[0] for leaf in leaves], spec)
