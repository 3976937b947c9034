"""float32 on request: a function in float64, as NumPy has it, seen through arguments and results in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from torchwright.optimization.numpy.tree import map_leaves

RTOL = 1e-4
"""The default tolerance of float32 results against NumPy's float64: relative, and as a share of their largest value."""
NARROW = {"float64": "float32", "complex128": "complex64"}
WIDE = {narrow: wide for wide, narrow in NARROW.items()}


def narrowed(value: Any) -> Any:
    """Nested arrays and NumPy scalars of double precision in single."""
    return _cast(value, NARROW)


def in_float64(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as NumPy computes it in float64, of arguments in float32, its results rounded to float32."""

    @functools.wraps(fn)
    def wide(*args: Any, **kwargs: Any) -> Any:
        return narrowed(fn(*_cast(args, WIDE, read_only=True), **_cast(kwargs, WIDE, read_only=True)))

    return wide


def _cast(value: Any, types: dict[str, str], *, read_only: bool = False) -> Any:
    """A write into a copy would be lost: where it is `read_only`, NumPy refuses it."""

    def cast(_: Any, leaf: Any) -> Any:
        if not (isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.name in types):
            return leaf
        found = leaf.astype(types[leaf.dtype.name])
        if read_only and isinstance(found, np.ndarray):
            found.flags.writeable = False
        return found

    return map_leaves(value, cast)
