"""Nested tuples, lists and dicts: what NumPy functions take and return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Path = tuple[Any, ...]
"""Indices and names that lead to a leaf."""


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf with its path, in order."""
    if isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, (*path, name))
    else:
        yield path, value


def map_leaves(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The same nesting with every leaf changed; named tuples keep their type."""
    if isinstance(value, tuple | list):
        items = [map_leaves(item, change, (*path, index)) for index, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {name: map_leaves(item, change, (*path, name)) for name, item in value.items()}
    return change(path, value)


def structure(value: Any) -> Any:
    """The types of the nesting and of its leaves, to be compared with another's."""
    if isinstance(value, tuple | list):
        return type(value), tuple(structure(item) for item in value)
    if isinstance(value, dict):
        return type(value), tuple((name, structure(item)) for name, item in value.items())
    return type(value)


def place(path: Path) -> str:
    """A path as Python writes it."""
    return "result" + "".join(f"[{step!r}]" for step in path)
