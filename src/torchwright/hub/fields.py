"""The fields of a config.json, each checked as it is read; an error names the file, the key and what it may be."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchwright.core.errors import ModelError, shown

LARGEST_INTEGER = 2**31 - 1
"""Sizes, counts and token ids; no published model comes near it, and products of a few of them stay exact."""
LARGEST_FACTOR = 1e12
"""Words in the names of numbers that scale or stretch something."""


class Fields:
    """A JSON object of a file, or of what `path` says in words.

    A key that is absent or null takes the default; without a default it is required. Each key that is asked for counts
    as read, so that `unread` finds the fields that nobody honoured.
    """

    def __init__(self, path: Path | str, data: dict[str, Any], prefix: str = "") -> None:
        self.path, self.data, self.prefix = path, data, prefix
        self._read: set[str] = set()
        self._sections: dict[str, Fields] = {}

    def get(self, key: str) -> Any:
        """Return the value under `key` unchecked, or None."""
        self._read.add(key)
        return self.data.get(key)

    def settle(self, *keys: str) -> None:
        """Count keys as read: what was read before leaves them without a meaning."""
        self._read.update(keys)

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yield the full name and the value of every key that was neither asked for nor settled."""
        for key, value in self.data.items():
            if key in self._sections:
                yield from self._sections[key].unread()
            elif key not in self._read:
                yield f"{self.prefix}{key}", value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._value(key, default)
        if type(value) is not int or value < minimum:
            raise self.wrong(key, f"an integer of {minimum} or more")
        if value > LARGEST_INTEGER:
            raise self.wrong(key, f"an integer of at most {LARGEST_INTEGER:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not _finite(value):
            raise self.wrong(key, "a finite number" if isinstance(value, float) else "a number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a number above 0 and at most `LARGEST_FACTOR`: a factor, a divisor or a base."""
        value = self.number(key, default)
        if not 1 / LARGEST_FACTOR <= value <= LARGEST_FACTOR:
            raise self.wrong(key, f"a number above 0, at most {LARGEST_FACTOR:g}")
        return value

    def optional(self, key: str) -> float | None:
        """Return a number, or None."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        value = self._value(key, None)
        good = isinstance(value, list) and all(map(_finite, value))
        if not good or len(value) != length:
            raise self.wrong(key, f"a list of {length} numbers")
        return tuple(float(x) for x in value)

    def items(self, key: str, length: int) -> list[Any] | None:
        """Return a list with one entry for each of `length` layers, or None."""
        value = self.get(key)
        if value is not None and (not isinstance(value, list) or len(value) != length):
            raise self.wrong(key, f"a list of {length} entries, one for each layer")
        return value

    def section(self, key: str) -> Fields:
        """Return the object under `key`, empty if there is none; every call returns the same one."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        if key not in self._sections:
            self._sections[key] = Fields(self.path, value, f"{self.prefix}{key}.")
        return self._sections[key]

    def ids(self, key: str) -> tuple[int, ...]:
        """Return one token id or several."""
        return self.integers(key, "a token id or a list of them")

    def integers(self, key: str, allowed: str) -> tuple[int, ...]:
        """Return one integer or a list of them, which `allowed` describes; empty if there is none."""
        value = self.get(key)
        found = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(number) is int and abs(number) <= LARGEST_INTEGER for number in found):
            raise self.wrong(key, allowed)
        return tuple(found)

    def wrong(self, key: str, allowed: str) -> ModelError:
        return ModelError(
            f"{self.path}: '{self.prefix}{key}' cannot be used",
            found=shown(self.data.get(key), 300),
            allowed=allowed,
        )

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None and default is None:
            raise ModelError(
                f"{self.path} has no '{self.prefix}{key}'", next="check that the file is complete"
            )
        return default if value is None else value


FACTOR = re.compile(r".*(scale|scaling|multiplier|factor|_mod|_group|_freq)")
"""Names of numbers that something is multiplied with or divided by, or counted in steps of."""


def is_off(name: str, value: Any) -> bool:
    """Check whether a value switches its feature off: null, false, 0, an empty object, or a factor of 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return not value
    return value == 0 or (value == 1 and FACTOR.fullmatch(name) is not None)


def _finite(value: Any) -> bool:
    """Check whether a JSON value is a number that a float can hold."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False
