"""From dumps to one answer: which rank, which collective, which line.

Ranks are aligned in each group by the calls' numbers, and where these part by lines and shapes (`align.py`). What was
found is then asked in this order, because each can make the later ones appear elsewhere as a consequence:

1. a rank that left out calls, or made some besides, and went on in the same group like the others;
2. ranks that wait for each other in a circle: a call on the wrong group, or calls on two groups in a different order;
3. calls of one number that contradict each other: order, dtype or shape;
4. a rank that others wait for and that waits for nobody: it never came, or it is dead;
5. a rank that failed, though nobody waited for it yet;
6. a rank that came, but late;
7. a call that all made alike and that has not ended: the network.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchwright.train.hang import words
from torchwright.train.hang.align import (
    Group,
    Parting,
    abandoned,
    groups_of,
    parting,
    shifted,
    unanswered,
)
from torchwright.train.hang.calls import Dump, RankCall, conflict
from torchwright.train.hang.finding import Finding

PATIENCE = 1.0
"""Seconds that ranks may be apart before one of them is called late."""


@dataclass
class _Case:
    dumps: dict[int, Dump]
    world: int
    groups: list[Group]
    partings: list[Parting]
    patience: int


def analyse(dumps: dict[int, Dump], *, patience: float = PATIENCE) -> Finding:
    """Why the job of `dumps` (rank → dump) is stuck, or that nothing says that it is.

    `patience`: seconds; a rank that others have waited for less long when its dump was taken is not accused.
    """
    known = [dump.world for dump in dumps.values() if dump.world is not None]
    listed = [rank for dump in dumps.values() for _, members in dump.groups.values() for rank in members]
    world = max([*known, *(rank + 1 for rank in [*dumps, *listed])])
    case = _Case(dumps, world, groups_of(dumps, world), [], int(patience * 1e9))
    for group in case.groups:
        case.partings += [found for found in (parting(group, dumps), abandoned(group, dumps)) if found]
    case.partings += unanswered(dumps)
    case.partings = [found for found in case.partings if len(found.classes) > 1 or _patient(found, case)]
    case.partings = [shifted(found, dumps) or found for found in case.partings]
    for ask in (_shifted, _circle, _contradiction, _never_came, _dead, _failed, _late, _unended):
        finding = ask(case)
        if finding is not None:
            return finding
    return words.nothing(case.dumps, case.groups)


def _patient(found: Parting, case: _Case) -> bool:
    """Check whether a missing rank will not come, or had been waited for longer than the patience at the time of its
    dump.
    """
    for rank in found.absent:
        dump = case.dumps.get(rank)
        if dump is None or dump.taken is None or dump.failed or dump.finished:
            return True
        if dump.taken - found.since >= case.patience:
            return True
    return False


def _waits(case: _Case) -> dict[int, list[Parting]]:
    """Rank → the partings in which it waits."""
    waits: dict[int, list[Parting]] = {}
    for found in case.partings:
        for rank in found.joined:
            waits.setdefault(rank, []).append(found)
    return waits


def _shifted(case: _Case) -> Finding | None:
    found = min(
        (found for found in case.partings if found.left_out), key=lambda found: found.since, default=None
    )
    if found is None:
        return None
    return words.order(found, case.dumps, "skipped" if found.left_out > 0 else "extra")


def _circle(case: _Case) -> Finding | None:
    """Two ranks that wait for each other, each in a group's call to which the other has not come."""
    waits = _waits(case)
    for found in sorted(case.partings, key=lambda found: found.since):
        for rank in found.joined:
            for other in found.absent:
                for back in waits.get(other, []):
                    if back.group.key != found.group.key and rank in back.absent:
                        return _name_circle(rank, found, other, back, case)
    return None


def _name_circle(rank: int, here: Parting, other: int, there: Parting, case: _Case) -> Finding:
    # The stray rank is the one that fewer of its group's members agree with.
    if _company(here, rank) < _company(there, other):
        rank, here, other, there = other, there, rank, here
    usual, stray = here.joined[rank], there.joined[other]
    if conflict(usual, stray) is None and _is_wrong_group(usual, stray, here, there, case):
        return words.wrong_group(other, there, here, case.dumps)
    return words.order_of_groups(rank, here, other, there, case.dumps)


def _company(found: Parting, rank: int) -> float:
    return len(found.of(rank)) / len(found.group.members)


def _is_wrong_group(usual: RankCall, stray: RankCall, here: Parting, there: Parting, case: _Case) -> bool:
    """Check whether `stray` is `usual` made on another group, as opposed to one of the program's own calls made too
    early.

    From the same lines it is the same call. From lines whose calls this group has seen before it is not. Where nothing
    was seen yet, groups of different members are more easily mistaken for each other than called in turn.
    """
    if usual.path and usual.path == stray.path:
        return True
    before = (call for calls in there.group.calls.values() for call in calls.values() if call.seq < stray.seq)
    if stray.path and any(call.path == stray.path for call in before):
        return False
    return set(here.group.members) != set(there.group.members)


def _contradiction(case: _Case) -> Finding | None:
    contradicting = [found for found in case.partings if len(found.classes) > 1]
    if not contradicting:
        return None
    found = min(contradicting, key=lambda found: found.since)
    rank, other = found.classes[0][0], found.classes[1][0]
    usual, odd = found.joined[rank], found.joined[other]
    kind = conflict(usual, odd)
    assert kind is not None
    if kind == "op" or _from_other_lines(usual, odd) or _matches_next(found, usual, odd):
        return words.order(found, case.dumps, _matches_next(found, usual, odd))
    return words.mismatch(kind, found, case.dumps)


def _from_other_lines(usual: RankCall, odd: RankCall) -> bool:
    return bool(usual.path and odd.path) and usual.path != odd.path


def _matches_next(found: Parting, usual: RankCall, odd: RankCall) -> str | None:
    """Return how one side's call appears among the other side's next ones: `skipped`, `extra`, `swapped`, or
    nothing.
    """
    after = {
        side: {rank: found.group.calls[rank].get(found.seq + 1) for rank in ranks}
        for side, ranks in (("usual", found.classes[0]), ("odd", found.classes[1]))
    }
    skipped = any(
        call and conflict(call, odd) is None and _same_line(call, odd) for call in after["usual"].values()
    )
    extra = any(
        call and conflict(call, usual) is None and _same_line(call, usual) for call in after["odd"].values()
    )
    if skipped and extra:
        return "swapped"
    return "skipped" if skipped else "extra" if extra else None


def _same_line(one: RankCall, other: RankCall) -> bool:
    return one.path == other.path


def _never_came(case: _Case) -> Finding | None:
    """The earliest call whose missing rank waits for nobody."""
    waits = _waits(case)
    candidates = [
        (found, [rank for rank in found.absent if rank not in waits])
        for found in sorted(case.partings, key=lambda found: found.since)
    ]
    for found, culprits in candidates:
        dead = [rank for rank in culprits if rank not in case.dumps]
        if dead:
            return words.dead(dead, found, case.dumps, case.world)
        if culprits:
            return words.never_came(culprits, found, case.dumps)
    for found, _ in candidates:
        # A longer circle than two: every rank waits, each for the next.
        return words.never_came(list(found.absent), found, case.dumps)
    return None


def _dead(case: _Case) -> Finding | None:
    dead = [rank for rank in range(case.world) if rank not in case.dumps]
    return words.dead(dead, None, case.dumps, case.world) if dead else None


def _failed(case: _Case) -> Finding | None:
    """The first rank that ended by an exception."""
    failed = [(dump.taken or 0, rank) for rank, dump in case.dumps.items() if dump.failed]
    return words.failed(min(failed)[1], case.dumps) if failed else None


def _late(case: _Case) -> Finding | None:
    """The last call to which a rank came later than the patience after all others."""
    late: list[tuple[int, int, Parting]] = []
    for found in _complete(case.groups):
        arrivals = sorted((call.created, rank) for rank, call in found.joined.items())
        if len(arrivals) > 1 and arrivals[-1][0] - arrivals[-2][0] >= case.patience:
            late.append((found.since, arrivals[-1][1], found))
    if not late:
        return None
    _, rank, found = max(late, key=lambda item: item[0])
    return words.slow(rank, found, case.dumps)


def _unended(case: _Case) -> Finding | None:
    """A call that all members made alike, and that has not ended although all their dumps are later."""
    for found in _complete(case.groups):
        arrived = max(call.created for call in found.joined.values())
        waiting = [
            rank
            for rank, call in found.joined.items()
            if not call.done and (case.dumps[rank].taken or 0) - arrived >= case.patience
        ]
        if waiting:
            return words.unended(waiting, found, case.dumps)
    return None


def _complete(groups: Iterable[Group]) -> Iterable[Parting]:
    """Every recorded call that all members of its group made."""
    for group in groups:
        for seq in sorted(set[int]().union(*group.calls.values())):
            joined = {rank: calls[seq] for rank, calls in group.calls.items() if seq in calls}
            if len(joined) == len(group.members):
                yield Parting(group, seq, joined, (), [sorted(joined)])
