"""Each kind of finding in words, with its evidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchwright.train.hang.align import Group, Parting, group_name
from torchwright.train.hang.calls import Dump, RankCall
from torchwright.train.hang.finding import Finding, Kind, RankFinding

Dumps = dict[int, Dump]
MOST_ROWS = 32


def never_came(culprits: Sequence[int], found: Parting, dumps: Dumps) -> Finding:
    """A living rank that did not come to a call."""
    rank = culprits[0]
    dump, call = dumps[rank], _any(found)
    last = max(dump.calls, key=lambda call: call.created, default=None)
    waited = "" if dump.taken is None else f" for {max(0, dump.taken - found.since) / 1e9:.1f} s"
    answer = (
        f"{_ranks(culprits).capitalize()} never came to {_numbered(found)}, {call.what}, in which "
        f"{_ranks(found.joined)} {_has(found.joined)} waited{waited}{_at(call)}. "
    )
    if dump.failed:
        answer += f"It ended by {dump.reason.rstrip('.')}. "
    elif dump.finished:
        answer += f"Rank {rank} had finished its program. "
    elif dump.stands is not None:
        answer += f"Rank {rank} was at {dump.stands} instead. "
    answer += (
        f"Its last collective was {_brief(last, dump)}." if last else "It has called no collective at all."
    )
    return _finding("never came", answer, culprits, found, dumps, "did not come")


def dead(ranks: Sequence[int], found: Parting | None, dumps: Dumps, world: int) -> Finding:
    """Ranks without a dump."""
    one = len(ranks) == 1
    answer = (
        f"{_ranks(ranks).capitalize()} {'is' if one else 'are'} dead or cannot run Python: of {world} ranks "
        f"{'it' if one else 'they'} alone left no dump. "
    )
    if found is None:
        return Finding("dead", answer + "The dumps that are there contradict nothing.", tuple(ranks))
    waiting = _ranks(found.joined).capitalize() + (" waits" if len(found.joined) == 1 else " wait")
    answer += f"{waiting} in {_numbered(found)}, {_any(found).what}{_at(_any(found))}."
    return _finding("dead", answer, ranks, found, dumps, "no dump")


def mismatch(kind: str, found: Parting, dumps: Dumps) -> Finding:
    """The same call with different shapes or dtypes."""
    usual, odd = found.classes[0], found.classes[1]
    one, other = found.joined[usual[0]], found.joined[odd[0]]
    answer = (
        f"{_ranks(odd).capitalize()} called {_numbered(found)} with another {kind} than {_ranks(usual)}: {other.what} "
        f"against {one.what}{_at(one)}."
    )
    return _finding("dtype" if kind == "dtype" else "shape", answer, _at_fault(found), found, dumps, "")


def order(found: Parting, dumps: Dumps, how: str | None) -> Finding:
    """Different calls of one number."""
    usual, odd = found.classes[0], found.classes[1]
    one, other = found.joined[usual[0]], found.joined[odd[0]]
    count = max(1, abs(found.left_out))
    calls, more, next_one = ("a call", "one call", "next one")
    if count > 1:
        calls, more, next_one = (f"{count} calls", f"{count} calls", f"call {found.seq + count}")
    clauses = {
        "skipped": f" {_ranks(odd).capitalize()} left out {calls}: what it made is the others' {next_one}.",
        "extra": f" {_ranks(odd).capitalize()} made {more} more than the others: theirs is its {next_one}.",
        "swapped": " Each made next what the other made first: the two calls are swapped.",
    }
    answer = (
        f"The order of calls differs: as {_numbered(found)} {_ranks(odd)} called {other.what}{_at(other)}, where "
        f"{_ranks(usual)} called {one.what}{_at(one)}.{clauses.get(how or '', '')}"
    )
    return _finding("order", answer, _at_fault(found), found, dumps, "")


def wrong_group(rank: int, there: Parting, here: Parting, dumps: Dumps) -> Finding:
    """A call made on a group on which nobody else makes it."""
    stray, usual = there.joined[rank], _any(here)
    answer = (
        f"Rank {rank} called {stray.what} on {there.group.name} ({_ranks(there.group.members)}){_at(stray)}, where "
        f"{_ranks(here.joined)} made the same call on {here.group.name} ({_ranks(here.group.members)}){_at(usual)} "
        f"and {'waits' if len(here.joined) == 1 else 'wait'} for it there: the wrong group."
    )
    rows = [*_rows(here, dumps, ""), _row(rank, "another group", stray, dumps)]
    return _with_rows(
        Finding("wrong group", answer, (rank,)), here, [row for row in rows if row.call or row.rank != rank]
    )


def order_of_groups(rank: int, here: Parting, other: int, there: Parting, dumps: Dumps) -> Finding:
    """Two ranks that call on two groups in a different order."""
    one, two = here.joined[rank], there.joined[other]
    answer = (
        f"The order of calls differs: rank {rank} waits for rank {other} in {_numbered(here)}, {one.what}{_at(one)}, "
        f"while rank {other} waits for rank {rank} in {_numbered(there)}, {two.what}{_at(two)}. One of them has to "
        "come first on every rank."
    )
    rows = [_row(rank, "waits", one, dumps), _row(other, "waits", two, dumps)]
    return _with_rows(Finding("order", answer, (rank, other)), here, rows)


def slow(rank: int, found: Parting, dumps: Dumps) -> Finding:
    """A rank that came, late."""
    arrivals = sorted(call.created for call in found.joined.values())
    late = (arrivals[-1] - arrivals[-2]) / 1e9
    call = found.joined[rank]
    others = [other for other in found.joined if other != rank]
    answer = (
        f"Rank {rank} is slow: it came to {_numbered(found)}, {call.what}, {late:.1f} s after {_ranks(others)}"
        f"{_at(call)}. All ranks have made the same calls in the same order."
    )
    return _finding("slow", answer, [rank], found, dumps, "")


def unended(waiting: Sequence[int], found: Parting, dumps: Dumps) -> Finding:
    """A call that all made, and that has not ended."""
    answer = (
        f"All members made {_numbered(found)}, {_any(found).what}, alike{_at(_any(found))}, but on {_ranks(waiting)} "
        "it has not ended: look at the network or the devices between them. (A broadcast's root and all-to-all's "
        "sizes are not in the dumps: ranks may disagree on those.)"
    )
    return _finding("not ended", answer, waiting, found, dumps, "")


def failed(rank: int, dumps: Dumps) -> Finding:
    """A rank that ended by an exception before anybody waited for it."""
    answer = f"Rank {rank} failed before any other: {dumps[rank].reason}. The calls of all ranks agree."
    return Finding("failed", answer, (rank,), rows=(_row(rank, "failed", None, dumps),))


def nothing(dumps: Dumps, groups: Sequence[Group]) -> Finding:
    """No fault."""
    calls = sum(len(dump.calls) for dump in dumps.values())
    answer = (
        f"Nothing says that this job is stuck: {calls} calls of {_ranks(dumps)} on {len(groups)} "
        f"group{'s' * (len(groups) != 1)} agree."
    )
    return Finding("nothing", answer)


def _finding(
    kind: Kind, answer: str, ranks: Iterable[int], found: Parting, dumps: Dumps, absent: str
) -> Finding:
    return _with_rows(Finding(kind, answer.strip(), tuple(ranks)), found, _rows(found, dumps, absent))


def _with_rows(finding: Finding, found: Parting, rows: Sequence[RankFinding]) -> Finding:
    rows = sorted(rows, key=lambda row: (row.rank not in finding.ranks, row.rank))
    left = len(rows) - MOST_ROWS
    return Finding(
        kind=finding.kind,
        answer=finding.answer,
        ranks=finding.ranks,
        group=found.group.name,
        members=found.group.members,
        seq=found.seq,
        rows=tuple(rows[:MOST_ROWS]),
        notes=(f"{left} more ranks are like these",) if left > 0 else (),
    )


def _rows(found: Parting, dumps: Dumps, absent: str) -> list[RankFinding]:
    rows: list[RankFinding] = []
    first = found.since
    for rank, call in found.joined.items():
        after = (call.created - first) / 1e9
        rows.append(_row(rank, "came first" if not after else f"came {after:.3f} s later", call, dumps))
    for rank in found.absent:
        rows.append(_row(rank, absent or "did not come", None, dumps))
    return rows


def _row(rank: int, part: str, call: RankCall | None, dumps: Dumps) -> RankFinding:
    dump = dumps.get(rank)
    now = "" if dump is None else dump.reason if dump.failed or dump.finished else str(dump.stands or "")
    if call is None:
        return RankFinding(rank, part, "", "", now)
    return RankFinding(rank, part, f"#{call.seq} {call.what}", call.where, now)


def _at_fault(found: Parting) -> list[int]:
    """Return the minority; both sides if there is none."""
    usual, odd = found.classes[0], found.classes[1]
    return odd if len(odd) < len(usual) else sorted([*usual, *odd])


def _any(found: Parting) -> RankCall:
    return next(iter(found.joined.values()))


def _numbered(found: Parting) -> str:
    call = _any(found)
    if call.peer is not None:
        return f"the other half of message {found.seq} between {_ranks(found.group.members)}"
    whole = found.group.description == "default_pg"
    return f"call {found.seq} of {found.group.name}{'' if whole else f' ({_ranks(found.group.members)})'}"


def _brief(call: RankCall, dump: Dump) -> str:
    description, _ = dump.groups.get(call.group, ("", ()))
    return f"#{call.seq} {call.what} on {group_name(call.group, description)}{_at(call)}"


def _at(call: RankCall) -> str:
    return f" at {call.where}" if call.where else ""


def _has(ranks: Iterable[int]) -> str:
    return "has" if len(list(ranks)) == 1 else "have"


def _ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0 to 2 and 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    text = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1] if parts else "none"
    return ("rank " if len(parts) == 1 and " to " not in text else "ranks ") + text
