"""Temporary fixes for Python code of models that torch.export cannot trace with dynamic shapes."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import sys
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from torchwright.core import nested


@contextlib.contextmanager
def named_arguments(model: nn.Module, kwargs: dict[str, Any]) -> Generator[None]:
    """Meanwhile `**kwargs` in the signature of `forward` are the names of `kwargs`.

    torch.export (of 2.11 and 2.13) looks for the free sizes of what `**kwargs` takes in the wrong place and fails.
    """
    forward, signature = model.forward, inspect.signature(model.forward)
    named = {name: each for name, each in signature.parameters.items() if each.kind != each.VAR_KEYWORD}
    if len(named) == len(signature.parameters):
        yield
        return

    def with_names(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs if name not in named]
    with_names.__signature__ = signature.replace(parameters=[*named.values(), *added])
    with nested.replaced_forward(model, with_names):
        yield


@contextlib.contextmanager
def sizes_by_len(model: nn.Module) -> Generator[None]:
    """Meanwhile `len(tensor)` in the sources of the model's modules is `tensor.shape[0]`, and so may stay free.

    Python makes a number of what `len` returns: a batch that RT-DETR takes from `len(source_flatten)` is the example's.
    """
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    sources = [vars(sys.modules[name]) for name in names if name in sys.modules and _is_models(name)]
    patched = [source for source in sources if "len" not in source]
    for source in patched:
        source["len"] = _len
    try:
        yield
    finally:
        for source in patched:
            del source["len"]


def _is_models(name: str) -> bool:
    """Check whether a module may hold a model's own code: Python's and PyTorch's own take sizes correctly."""
    return name.partition(".")[0] not in {"torch", *sys.stdlib_module_names}


def _len(value: Any) -> Any:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.ndim else builtins.len(value)
