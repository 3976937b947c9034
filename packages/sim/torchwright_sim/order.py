"""Finds missing synchronisation: a tensor used on a stream that has not waited for the stream that wrote it.

Each stream has a vector clock: for every other stream, the number of its last command that this one has waited for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Use:
    """A command that used an allocation."""

    stream: int
    number: int
    operator: str


@dataclass
class _Uses:
    write: Use | None
    reads: dict[int, Use] = field(default_factory=dict)
    """The last of each stream since the write."""


MOST = 1 << 16
"""Allocations that are remembered. The oldest are forgotten, which can hide a hazard and never invents one."""


class Order:
    """Clocks of one device's streams, and the last uses of its allocations."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._waited: dict[int, dict[int, int]] = {}
        self._host: dict[int, int] = {}
        self._uses: dict[int, _Uses] = {}
        self._events: dict[tuple[int, int], dict[int, int]] = {}

    def host_waited(self, stream: int, number: int) -> None:
        """Note that the host has waited for a command: everything launched later comes after it."""
        self._host[stream] = max(self._host.get(stream, 0), number)
        for other, seen in self._events.get((stream, number), {}).items():
            self._host[other] = max(self._host.get(other, 0), seen)

    def recorded(self, stream: int, number: int) -> None:
        """Note an event: whoever waits for it has waited for all that its stream had waited for."""
        self._events[stream, number] = dict(self._waited.get(stream, {}))
        if len(self._events) > MOST:
            del self._events[next(iter(self._events))]

    def stream_waits(self, stream: int, other: int, number: int) -> None:
        """Note that a stream waits for a command of another."""
        seen = self._waited.setdefault(stream, {})
        for known, last in {**self._events.get((other, number), {}), other: number}.items():
            seen[known] = max(seen.get(known, 0), last)

    def hazard(self, use: Use, reads: Iterable[int], writes: Iterable[int]) -> str | None:
        """Note a command's use of allocations; returns what it should have waited for, or None."""
        found = None
        written = set(writes)
        for serial in set(reads) - written:
            uses = self._uses.setdefault(serial, _Uses(None))
            found = found or self._missing(use, uses.write, "reads", "wrote")
            uses.reads[use.stream] = use
        for serial in written:
            uses = self._uses.get(serial)
            if uses is not None:
                found = found or self._missing(use, uses.write, "writes", "wrote")
                for read in uses.reads.values():
                    found = found or self._missing(use, read, "writes", "reads")
            self._uses[serial] = _Uses(dataclasses.replace(use))
            if len(self._uses) > MOST:
                del self._uses[next(iter(self._uses))]
        return found

    def _missing(self, use: Use, earlier: Use | None, does: str, did: str) -> str | None:
        if earlier is None or earlier.stream == use.stream:
            return None
        waited = max(
            self._waited.get(use.stream, {}).get(earlier.stream, 0), self._host.get(earlier.stream, 0)
        )
        if waited >= earlier.number:
            return None
        return (
            f"missing synchronisation on {self.place}: {use.operator} on stream {use.stream} {does} a tensor that "
            f"{earlier.operator} {did} on stream {earlier.stream}, and stream {use.stream} has not waited for it; "
            f"record an event on stream {earlier.stream} after {earlier.operator} and have stream {use.stream} wait "
            f"for the event"
        )
