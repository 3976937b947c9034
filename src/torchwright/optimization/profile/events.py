# pyright: basic
"""The profiler's events as a tree: who was called by whom, and what time was its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchwright.optimization.profile.kinds import is_operator


@dataclass
class RecordedEvent:
    """Something that ran on one thread; nanoseconds."""

    name: str
    start: int
    end: int
    operator: bool
    """True for work, False for a label around work."""
    shapes: Sequence[Any] = ()
    dtypes: Sequence[str] = ()
    values: Sequence[Any] = ()
    """Arguments other than tensors."""
    children: list[RecordedEvent] = field(default_factory=list)

    @property
    def own(self) -> int:
        """Its time without that of its children."""
        return self.end - self.start - sum(child.end - child.start for child in self.children)

    def within(self) -> Iterator[RecordedEvent]:
        """Itself and everything that it called."""
        yield self
        for child in self.children:
            yield from child.within()


def read(profiler: torch.profiler.profile) -> list[RecordedEvent]:
    """The roots of every thread's events, in the order of their starts."""
    events = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    threads: dict[int, list[RecordedEvent]] = {}
    for event in events:
        if event.is_async() or _is_python(event):
            continue
        name = event.name()
        found = RecordedEvent(
            name=name,
            start=event.start_ns(),
            end=event.start_ns() + event.duration_ns(),
            operator=is_operator(name) and not event.is_user_annotation(),
            shapes=event.shapes(),
            dtypes=event.dtypes(),
            values=event.concrete_inputs(),
        )
        threads.setdefault(event.start_thread_id(), []).append(found)
    roots = [root for found in threads.values() for root in nest(found)]
    return sorted(roots, key=lambda root: root.start)


def _is_python(event: Any) -> bool:
    """Check whether the event is a Python call; torch 2.11 records none and has no attribute for them."""
    asked = getattr(event, "is_python_function", None)
    return asked is not None and asked()


def nest(events: Iterable[RecordedEvent]) -> list[RecordedEvent]:
    """One thread's events, each put below the one in whose time it lies; the roots are returned."""
    roots: list[RecordedEvent] = []
    above: list[RecordedEvent] = []
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        while above and above[-1].end < event.end:
            above.pop()
        (above[-1].children if above else roots).append(event)
        above.append(event)
    return roots


def covered(events: Iterable[RecordedEvent], start: int, end: int) -> int:
    """Nanoseconds between `start` and `end` in which an operator ran, on whatever thread."""
    spans = sorted((max(e.start, start), min(e.end, end)) for e in events if e.start < end and e.end > start)
    total, reached = 0, start
    for begin, stop in spans:
        total += max(0, stop - max(begin, reached))
        reached = max(reached, stop)
    return total


def outermost(roots: Iterable[RecordedEvent]) -> Iterator[RecordedEvent]:
    """Operators that no other operator has called."""
    for root in roots:
        if root.operator:
            yield root
        else:
            yield from outermost(root.children)
