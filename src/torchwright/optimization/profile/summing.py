# pyright: basic
"""Sums of recorded events over one pass."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torchwright.core.records import DeviceFacts
from torchwright.optimization.profile.counting import COMPUTING, CountedWork, count, dtype_name
from torchwright.optimization.profile.events import RecordedEvent, covered, outermost
from torchwright.optimization.profile.kinds import kind_of
from torchwright.optimization.profile.rates import rate
from torchwright.optimization.profile.values import CallTime, Kind, KindTime, OperatorTime, Recording

CALL = "call "
"""Before a case's name: the label of each of its calls."""
COMPILED = "compiled code"
"""The label of code that was compiled ahead of time: its kernels have no names unless it was made for a profile."""
COPY = "aten::copy_"
COUNTED_SHARE = 0.99
"""An operator counts as counted in full if this share of its time is."""
COMPILED_BY_TORCH = "## Call CompiledFxGraph"
"""Torch's label of a graph that torch.compile has compiled."""


@dataclass
class _Sum:
    """One operator over one pass: calls, nanoseconds, and of those that could be counted operations and bytes."""

    calls: float = 0.0
    own: float = 0.0
    counted: float = 0.0
    """Nanoseconds of the calls that could be counted."""
    operations: float | None = 0.0
    bytes: float | None = 0.0
    dtypes: Counter[str] = field(default_factory=Counter)

    def add(self, own: int, counted: CountedWork | None, weight: float) -> None:
        self.calls += weight
        self.own += own * weight
        if counted is not None:
            self.counted += own * weight
            self.operations = _plus(self.operations, counted.operations, weight)
            self.bytes = _plus(self.bytes, counted.bytes, weight)
            self.dtypes[counted.dtype] += own


def summed(
    roots: Sequence[RecordedEvent], calls: Sequence[CallTime], device: DeviceFacts, *, named: bool
) -> Recording:
    """One pass over the calls, from the events of all that were recorded.

    With `named` the time of compiled code outside of its kernels is idle; else it is that of kernels without names.
    """
    sums: dict[tuple[str, Kind], _Sum] = {}
    total = idle = unnamed = 0.0
    for label, weight in _quicker_half(roots, calls):
        work = [
            label,
            *(root for root in roots if root is not label and label.start <= root.start < label.end),
        ]
        for event, kind, counted in _operators(work):
            sums.setdefault((_title(event, kind), kind), _Sum()).add(event.own, counted, weight)
        hidden = 0 if named else sum(_uncovered(event) for event in _compiled(work))
        total += (label.end - label.start) * weight
        unnamed += hidden * weight
        idle += (label.end - label.start - covered(outermost(work), label.start, label.end) - hidden) * weight
    operators = [_operator(*key, found, total, device) for key, found in sums.items() if found.own > 0]
    computing = [found for (_, kind), found in sums.items() if kind in COMPUTING]
    kinds: dict[Kind, float] = defaultdict(float)
    for operator in operators:
        kinds[operator.kind] += operator.seconds
    kinds["compiled code"], kinds["idle"] = unnamed / 1e9, idle / 1e9
    return Recording(
        seconds=total / 1e9,
        unrecorded_seconds=sum(call.unrecorded_seconds * call.repeat for call in calls),
        idle_seconds=idle / 1e9,
        idle_share=idle / total,
        computing_seconds=sum(found.own for found in computing) / 1e9,
        operations=_operations(computing),
        calls=tuple(calls),
        kinds=tuple(
            KindTime(kind=kind, seconds=seconds, share=seconds * 1e9 / total)
            for kind, seconds in sorted(kinds.items(), key=lambda item: -item[1])
            if seconds > 0
        ),
        operators=tuple(sorted(operators, key=lambda operator: -operator.seconds)),
    )


def _quicker_half(
    roots: Sequence[RecordedEvent], calls: Sequence[CallTime]
) -> Iterator[tuple[RecordedEvent, float]]:
    """Return the faster half of each kind's calls with its weight in a pass: the other half was disturbed."""
    for call in calls:
        made = sorted(
            (root for root in roots if root.name == CALL + call.name), key=lambda root: root.end - root.start
        )
        kept = made[: (len(made) + 1) // 2]
        yield from ((label, call.repeat / len(kept)) for label in kept)


def _operators(events: Iterable[RecordedEvent]) -> Iterator[tuple[RecordedEvent, Kind, CountedWork | None]]:
    """Return every operator with its kind and its counted work.

    What computes is counted where its sizes are first seen, and that goes to the one within it that does the work: of a
    linear layer to the product that it calls. Those on the way there are dispatch, as is all that leaves more than half
    of its work to operators of the same kind.
    """
    waiting: list[tuple[RecordedEvent, Kind | None]] = [(event, None) for event in events]
    workers: dict[int, CountedWork] = {}
    while waiting:
        event, counted_as = waiting.pop()
        if event.operator:
            kind = _kind(event)
            alike = [inner for inner in _below(event) if _kind(inner) == kind]
            if kind in COMPUTING:
                works, counts = not alike, counted_as != kind and not _computes_by_others(event, kind)
            else:
                works = counts = event.own >= sum(inner.own for inner in alike)
            counted = count(event.name, kind, event.shapes, event.dtypes, event.values) if counts else None
            if counted is not None:
                workers[id(event if works else _worker(event, kind))] = counted
                counted_as = kind
            yield event, kind if works else "dispatch", workers.get(id(event))
        waiting.extend((child, counted_as) for child in event.children)


def _worker(event: RecordedEvent, kind: Kind) -> RecordedEvent:
    """The longest of the operators within an event that are of its kind and call none of that kind."""
    alike = [inner for inner in event.within() if inner.operator and _kind(inner) == kind]
    leaves = [inner for inner in alike if not any(_kind(below) == kind for below in _below(inner))]
    return max(leaves, key=lambda inner: inner.own)


def _computes_by_others(event: RecordedEvent, kind: Kind) -> bool:
    """Check whether operators of another kind do its work, such as products within attention."""
    return any(_kind(inner) in COMPUTING and _kind(inner) != kind for inner in _below(event))


def _below(event: RecordedEvent) -> Iterator[RecordedEvent]:
    """The operators that it called, and those that they called."""
    return (inner for child in event.children for inner in child.within() if inner.operator)


def _kind(event: RecordedEvent) -> Kind:
    if event.name == COPY and event.dtypes[0] != event.dtypes[1]:
        return "casts"
    return kind_of(event.name)


def _title(event: RecordedEvent, kind: Kind) -> str:
    """The operator's name; a copy to another type says to which."""
    if event.name == COPY and kind == "casts":
        return f"{event.name} to {dtype_name(event.dtypes[0])}"
    return event.name


def _compiled(events: Iterable[RecordedEvent]) -> Iterator[RecordedEvent]:
    """The outermost labels around compiled code."""
    for event in events:
        if event.name == COMPILED or event.name.startswith(COMPILED_BY_TORCH):
            yield event
        else:
            yield from _compiled(event.children)


def _uncovered(event: RecordedEvent) -> int:
    """Nanoseconds of an event in which no operator ran."""
    return event.end - event.start - covered(outermost(event.children), event.start, event.end)


def _operator(name: str, kind: Kind, found: _Sum, total: float, device: DeviceFacts) -> OperatorTime:
    dtype = found.dtypes.most_common(1)[0][0] if found.dtypes else ""
    return OperatorTime(
        name=name,
        kind=kind,
        calls=found.calls,
        seconds=found.own / 1e9,
        share=found.own / total,
        rate=rate(found.operations, found.bytes, found.counted / 1e9, dtype, device)
        if found.counted
        else None,
    )


def _operations(sums: Sequence[_Sum]) -> float | None:
    """Return the operations of all computing events; None where some could not be counted."""
    if not sums or any(
        found.operations is None or found.counted < COUNTED_SHARE * found.own for found in sums
    ):
        return None
    return sum(found.operations or 0.0 for found in sums)


def _plus(total: float | None, more: int | None, weight: float) -> float | None:
    """None where one of them is not known."""
    return None if total is None or more is None else total + more * weight
