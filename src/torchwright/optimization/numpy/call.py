"""The arguments of one call: as given, as the compiled function takes them, and what they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchwright.optimization.numpy.report import ProgramRefused
from torchwright.optimization.numpy.tree import map_leaves


@dataclass(slots=True)
class ArrayCall:
    """One call. Calls with equal ``key`` are of one kind: they share a verdict."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: tuple[Any, ...] = ()
    """Structure, dtypes, ranks and size class."""
    arrays: list[np.ndarray] = field(default_factory=list)
    prepared_args: tuple[Any, ...] = ()
    prepared_kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def describe(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArrayCall:
        """Raises `ProgramRefused` for an argument that torch cannot take with NumPy's meaning."""
        call = cls(args, kwargs)
        parts: list[Any] = []
        call.prepared_args = tuple(_prepare(value, parts, call.arrays) for value in args)
        for name in kwargs:
            parts.append(name)
            call.prepared_kwargs[name] = _prepare(kwargs[name], parts, call.arrays)
        elements = sum(array.size for array in call.arrays)
        parts.append(elements.bit_length() // 2)  # speed is judged anew when the size changes about fourfold
        call.key = tuple(parts)
        return call

    @property
    def signature(self) -> tuple[Any, ...]:
        """The key without the size class: compiled programs are shared by all sizes."""
        return self.key[:-1]

    @property
    def key_of_any_text(self) -> tuple[Any, ...]:
        """The key without what its texts say."""

        def is_text(part: Any) -> bool:
            return isinstance(part, tuple) and (part[0] is str or part[0] is bytes)

        return tuple(part[0] if is_text(part) else part for part in self.key)

    def with_arrays(
        self, change: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with every array changed."""

        def changed(_: Any, leaf: Any) -> Any:
            return change(leaf) if isinstance(leaf, np.ndarray) else leaf

        return map_leaves(self.args, changed), map_leaves(self.kwargs, changed)

    def pretty(self) -> str:
        """The arguments for people: arrays by dtype and shape."""
        shown = [_pretty(value) for value in self.args] + [
            f"{k}={_pretty(v)}" for k, v in self.kwargs.items()
        ]
        return f"({', '.join(shown)})"


class _WriteableAlias:
    """The memory of a read-only array as a writeable one: Dynamo would set the flag on the user's own array.

    Nothing writes to it: graphs that write into an argument are refused, and so are results that share its memory.
    """

    def __init__(self, array: np.ndarray) -> None:
        self._keep_alive = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _prepare(value: Any, parts: list[Any], arrays: list[np.ndarray]) -> Any:
    """Append what ``value`` is to ``parts`` and its arrays to ``arrays``; return what to hand to torch."""
    kind = type(value)
    if kind is np.ndarray:
        _require_dtype(value.dtype)
        parts.append((value.dtype, value.ndim, value.flags.writeable))
        arrays.append(value)
        if not value.flags.c_contiguous and any(
            stride < 0 or stride % value.itemsize for stride in value.strides
        ):
            return value.copy()  # torch has no negative or odd strides; nothing that serves writes into it
        return value if value.flags.writeable else np.asarray(_WriteableAlias(value))
    if isinstance(value, np.generic):
        _require_dtype(value.dtype)
        parts.append(("scalar", value.dtype))
        return value
    if kind in (int, float, complex):
        parts.append(kind)
        return value
    if value is None or kind in (bool, str, bytes) or isinstance(value, np.dtype | type):
        parts.append((kind, value))
        return value
    if kind in (tuple, list):
        parts.append((kind, len(value)))
        return kind([_prepare(item, parts, arrays) for item in value])
    if kind is dict:
        parts.append((kind, tuple(value)))
        return {name: _prepare(item, parts, arrays) for name, item in value.items()}
    raise ProgramRefused(
        f"an argument is a {kind.__module__}.{kind.__qualname__}, neither array nor plain data"
    )


def _require_dtype(dtype: np.dtype) -> None:
    if dtype.kind not in "biufc" or not dtype.isnative or dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise ProgramRefused(f"dtype {dtype.str} has no torch counterpart")


def _pretty(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(_pretty, value))})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_pretty(v)}" for k, v in value.items()) + "}"
    return type(value).__name__ if isinstance(value, np.generic) else repr(value)
