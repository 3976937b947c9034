# pyright: basic
"""Models that are given in training mode: which of their modules compute otherwise after `eval()`."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from torch import nn

SHOWN = 3
"""Modules that the notice names."""
SWITCHES = ("train", "eval", "__init__")
"""Methods that set the mode."""


def training_modules(model: nn.Module) -> list[str]:
    """Names of the modules in training mode whose code asks for the mode: dropout, batch norm, the user's own.

    Linear layers and the like compute the same in both modes and are left out.
    """
    return [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if module.training and _asks_for_mode(module) and not _drops_nothing(module)
    ]


def training_notice(model: nn.Module) -> str | None:
    """Return one sentence if the model's `eval()` copy computes something else, or None."""
    found = training_modules(model)
    if not found:
        return None
    shown = ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
    return (
        f"the model is in training mode: {shown}. Its eval() copy is used, which may answer differently; "
        "the model itself is unchanged. Call model.eval() first if this is intended"
    )


def _asks_for_mode(module: nn.Module) -> bool:
    own = [
        value for value in vars(module).values() if isinstance(value, types.FunctionType | types.MethodType)
    ]
    return _class_asks(type(module)) or any(_reads_mode(function) for function in own)


@cache
def _class_asks(cls: type) -> bool:
    below = cls.__mro__[: cls.__mro__.index(nn.Module)]
    return any(
        _reads_mode(function)
        for base in below
        for name, value in vars(base).items()
        if name not in SWITCHES
        for function in _functions(value)
    )


def _functions(value: Any) -> Iterator[Callable[..., Any]]:
    if isinstance(value, property):
        yield from (function for function in (value.fget, value.fset) if function is not None)
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif callable(value):
        yield value


def _reads_mode(function: Callable[..., Any]) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and _names_mode(code)


def _names_mode(code: types.CodeType) -> bool:
    """Check whether code reads an attribute `training`, also by its name as a string."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return "training" in code.co_names or "training" in code.co_consts or any(map(_names_mode, inner))


def _drops_nothing(module: nn.Module) -> bool:
    """Check for a layer of torch that asks for the mode to drop values, with a probability of zero."""
    if type(module).__module__.partition(".")[0] != "torch":
        return False
    probability = getattr(module, "p", getattr(module, "dropout", None))
    return isinstance(probability, int | float) and probability == 0
