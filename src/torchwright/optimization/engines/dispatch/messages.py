# pyright: basic
"""Messages about calls: the warning of a slower path, and calls as text for errors."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

from torchwright.core import nested
from torchwright.core.errors import SlowerCall, TorchwrightError, abbreviated, shown
from torchwright.optimization.engines.dispatch.spec import CallSpec

MOST_OF_LEAF = 60
"""Characters of one value in the text of a call."""


def say_slower(how: str, call: str = "") -> None:
    """Warn that a call takes a slower path. The caller does so once for each path."""
    text = f"a call {call} goes a slower way: {how} (said once for all such calls)".replace("  ", " ")
    warnings.warn(text, SlowerCall, stacklevel=_outside())


def untraceable(what: str) -> TorchwrightError:
    """Return the error for a tracer that reaches compiled code."""
    return TorchwrightError(
        f"{what} cannot look into an optimized model",
        found="its code is compiled already",
        next="trace the original; torch.compile takes a model with this one inside",
    )


def _outside() -> int:
    """Return the stack level of the first caller outside of this package and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("torchwright.", "torch.")
    ):
        level, frame = level + 1, frame.f_back
    return level


def signature(args: Any, kwargs: dict[str, Any]) -> str:
    """Return the types and shapes of a call's tensors, and its other values, as text."""
    parts = [_leaf(value) for value in nested.leaves(args)]
    for key, value in sorted(kwargs.items()):
        parts.append(f"{key}=" + "+".join(_leaf(leaf) for leaf in nested.leaves(value)))
    return abbreviated("(" + ", ".join(parts) + ")")


def text_of(spec: CallSpec) -> str:
    """Return what a compiled call takes in the form of `signature`; dynamic sizes by their names."""
    return "(" + ", ".join(f"{t.dtype}[{', '.join(map(str, t.shape))}]" for t in spec.tensors) + ")"


def _leaf(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return shown(value, MOST_OF_LEAF)
