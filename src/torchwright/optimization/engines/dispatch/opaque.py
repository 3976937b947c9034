# pyright: basic
"""A compiled call as one operator, so that a model around it compiles without a graph break.

A tracer runs the model with tensors that have sizes and no data. It sees `torchwright_calls::call`, whose results'
sizes come from the call's specification; the dispatcher itself runs when the compiled model does.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from torchwright.core import nested
from torchwright.optimization.engines.dispatch.call_dispatcher import CallDispatcher
from torchwright.optimization.engines.dispatch.messages import untraceable
from torchwright.optimization.engines.dispatch.spec import SIZE, TENSOR

_dispatchers: weakref.WeakValueDictionary[int, CallDispatcher] = weakref.WeakValueDictionary()
"""By `id`: an operator takes numbers and tensors only."""
_MARK = "torchwright: None or text"
_odd: list[str | None] = []
"""Placeholders for values that a traced call cannot return, in a dictionary with `_MARK`."""
_numbers = itertools.count()
_forms: dict[int, tuple[list[Any], Any]] = {}
"""Arguments as (leaves, with None for tensors; pytree's spec), by the number that the operator is given."""


def exporting() -> bool:
    """Check whether torch.export is running. Until 2.11 Dynamo takes torch's own `is_exporting()` for true in any
    caller.
    """
    return torch.compiler._is_exporting_flag


def traced(dispatcher: CallDispatcher) -> Callable[[Any, Any], Any]:
    """Return the value that a tracer sees for `dispatcher(*args, **kwargs)`.

    A graph breaks at what no operator can say: that it changes one of its tensors, and classes that pytree has not.
    """
    if dispatcher.mutates:
        return _broken(dispatcher, "this optimized model changes its inputs")
    if dispatcher.returns_instances:
        return _broken(dispatcher, "this optimized model returns a dataclass instance or a named tuple")
    apart = _broken(dispatcher, "this optimized model takes a dataclass instance")
    _operator()
    _dispatchers[id(dispatcher)] = dispatcher

    @torch._dynamo.nonstrict_trace
    def call(args: Any, kwargs: Any) -> Any:
        if exporting():
            raise untraceable("torch.export")
        found = dispatcher.result_of(args, kwargs)
        if found is None or SIZE in found[0].spec.results:
            return dispatcher.by_original(args, kwargs), False
        leaves, spec = pytree.tree_flatten((args, kwargs))
        # An operator without a backward of its own would record one that fails; the dispatcher records none.
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        form = next(_numbers)
        _forms[form] = ([None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves], spec)
        compiled = found[0]
        outputs = torch.ops.torchwright_calls.call(tensors, id(dispatcher), form)
        if compiled.spec.results:
            remaining = iter(outputs)
            outputs = [next(remaining) if kind == TENSOR else None for kind in compiled.spec.results]
        result = compiled.build(outputs)
        odd = [
            leaf for leaf in pytree.tree_leaves(result, is_leaf=_is_none) if leaf is None or type(leaf) is str
        ]
        return (pytree.tree_map(_marked, result, is_leaf=_is_none), True) if odd else (result, False)

    def whole(args: Any, kwargs: Any) -> Any:
        if nested.has_dataclasses((args, kwargs)):
            return apart(args, kwargs)
        result, marked = call(args, kwargs)
        return pytree.tree_map(_unmarked, result, is_leaf=_is_mark) if marked else result

    return whole


def _is_none(value: Any) -> bool:
    return value is None


def _marked(value: Any) -> Any:
    if value is not None and type(value) is not str:
        return value
    if value not in _odd:
        _odd.append(value)
    return {_MARK: _odd.index(value)}


def _is_mark(value: Any) -> bool:
    return isinstance(value, dict) and _MARK in value


def _unmarked(value: Any) -> Any:
    return _odd[value[_MARK]] if _is_mark(value) else value


def _broken(dispatcher: CallDispatcher, reason: str) -> Callable[[Any, Any], Any]:
    """A graph break, or with `fullgraph=True` the reason why there would be one."""

    @torch._dynamo.disable(reason=reason)
    def call(args: Any, kwargs: Any) -> Any:
        return dispatcher(*args, **kwargs)

    return call


@functools.cache
def refuses_export() -> Callable[[], NoReturn]:
    """Raises; with `strict=True` torch.export gives the reason itself."""

    @torch._dynamo.disable(reason="torch.export cannot look into an optimized model")
    def refuse() -> NoReturn:
        raise untraceable("torch.export")

    return refuse


@functools.cache
def _operator() -> None:
    """Register the operator; not at import, which nothing is done at."""

    @torch.library.custom_op("torchwright_calls::call", mutates_args=())
    def call(tensors: list[torch.Tensor], dispatcher: int, form: int) -> list[torch.Tensor]:
        args, kwargs = _arguments(tensors, form)
        _, promised = _dispatchers[dispatcher].result_of(args, kwargs) or (None, [])
        results = [
            t
            for t in pytree.tree_leaves(_dispatchers[dispatcher](*args, **kwargs))
            if isinstance(t, torch.Tensor)
        ]
        taken = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return [_own(t, strides, taken) for t, (_, strides, _) in zip(results, promised, strict=True)]

    @call.register_fake
    def _(tensors: list[torch.Tensor], dispatcher: int, form: int) -> list[torch.Tensor]:
        args, kwargs = _arguments(tensors, form)
        found = _dispatchers[dispatcher].result_of(args, kwargs)
        assert found is not None
        device = tensors[0].device if tensors else "cpu"
        return [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype in found[1]
        ]


def _own(tensor: torch.Tensor, strides: Sequence[int], taken: set[int]) -> torch.Tensor:
    """`tensor` with the promised strides, and memory that neither an argument nor another result has."""
    memory = tensor.untyped_storage().data_ptr()
    if memory not in taken and tensor.stride() == tuple(strides):
        taken.add(memory)
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _arguments(tensors: list[torch.Tensor], form: int) -> Any:
    leaves, spec = _forms[form]
    remaining = iter(tensors)
    return pytree.tree_unflatten([next(remaining) if leaf is None else leaf[0] for leaf in leaves], spec)
