"""Registries from names to classes, for built-ins and entry points alike.

    techniques = Registry[type[Technique]]("technique", group="torchwright.techniques", builtins={...})
    techniques.get("dtype")

A built-in is declared as "module:attribute" and imported on first use, so that listing costs nothing and
`--help` never imports torch. A third-party package adds one by an entry point of the group.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoints, entry_points
from typing import Generic, TypeVar, cast

from torchwright.core.errors import TorchwrightError, unknown

T = TypeVar("T")


class Registry(Generic[T]):
    """Names of one kind, resolved on first use.

    Raises `UnknownName` (with the nearest name) for a name that is not registered, and `TorchwrightError` if an entry
    point claims a name that is taken, cannot be imported, or names a class that calls itself otherwise. `next` is the
    first error's advice if no command lists this kind. `installed` returns the entry points to look in.
    """

    def __init__(
        self,
        kind: str,
        *,
        group: str,
        builtins: Mapping[str, str],
        next: str | None = None,
        installed: Callable[[], EntryPoints] | None = None,
    ) -> None:
        self.kind, self.group = kind, group
        self._next = next or f"`torchwright {kind}s` lists them"
        self._targets = dict(builtins)
        self._loaded: dict[str, T] = {}
        self._installed = installed or _installed
        self._scanned = False

    def names(self) -> list[str]:
        """Every registered name, built-ins first in their declared order."""
        self._scan()
        return list(self._targets)

    def get(self, name: str) -> T:
        """The class registered under `name`."""
        self._scan()
        if name not in self._targets:
            raise unknown(self.kind, name, self._targets, next=self._next)
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    @contextmanager
    def adding(self, classes: Mapping[str, str | T]) -> Generator[None]:
        """Register classes, or "module:attribute" as an entry point does, for the duration of a context.

        A name that is taken is replaced.
        """
        self._scan()
        before = self._targets, self._loaded
        targets = {name: found if isinstance(found, str) else str(found) for name, found in classes.items()}
        made = {name: found for name, found in classes.items() if not isinstance(found, str)}
        loaded = {name: found for name, found in self._loaded.items() if name not in targets}
        self._targets, self._loaded = {**self._targets, **targets}, {**loaded, **made}
        try:
            yield
        finally:
            self._targets, self._loaded = before

    def __iter__(self) -> Iterator[tuple[str, T]]:
        return ((name, self.get(name)) for name in self.names())

    def _load(self, name: str) -> T:
        target = self._targets[name]
        module, _, attribute = target.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise TorchwrightError(
                f"the {self.kind} '{name}' is registered as {target} but cannot be imported",
                found=str(error),
            ) from error
        # Recipes, options and the documentation know it by the class's name.
        own = getattr(found, "name", None)
        if own != name:
            raise TorchwrightError(
                f"the {self.kind} '{name}' is registered as {target}, and that class has another name",
                found=f"name = {own!r}" if own is not None else "no class attribute `name`",
                next=f"write name = {name!r} in the class, or give the entry point the class's name",
            )
        return found

    def _scan(self) -> None:
        if self._scanned:
            return
        self._scanned = True
        for point in self._installed().select(group=self.group):
            if self._targets.get(point.name, point.value) != point.value:
                raise TorchwrightError(
                    f"two packages register the {self.kind} '{point.name}'",
                    found=f"{self._targets[point.name]} and {point.value}",
                    next="uninstall one of them",
                )
            self._targets[point.name] = point.value


def added(group: str) -> list[str]:
    """Return the names that installed packages add to an entry-point group, without importing any of them."""
    return [point.name for point in _installed().select(group=group)]


@functools.cache
def _installed() -> EntryPoints:
    """Return the entry points of installed packages, read once for all registries: each look takes milliseconds of
    every start.
    """
    return cast(EntryPoints, entry_points())  # Python 3.11 has a dict of them with the same `select`
