"""Ranks side by side: for each process group the first call on which its members part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torchwright.train.hang.calls import Dump, RankCall, conflict
from torchwright.train.hang.edits import first_gap


@dataclass
class Group:
    """A process group over all dumps."""

    key: str
    description: str
    members: tuple[int, ...]
    calls: dict[int, dict[int, RankCall]]
    """Rank → number → call."""

    @property
    def name(self) -> str:
        """For people."""
        return group_name(self.key, self.description)


@dataclass
class Parting:
    """The first call of a group that its members did not all make, or not alike."""

    group: Group
    seq: int
    joined: dict[int, RankCall]
    absent: tuple[int, ...]
    """Members that have not come to it; those without a dump among them, if they may be the reason."""
    classes: list[list[int]] = field(default_factory=list)
    """Ranks that agree with each other, the largest class first; one class where nothing contradicts."""
    left_out: int = 0
    """Calls that the second class left out here, below 0 made besides, before it went on like the first; else 0."""

    @property
    def since(self) -> int:
        """When the first rank came (nanoseconds since 1970)."""
        return min(call.created for call in self.joined.values())

    def of(self, rank: int) -> list[int]:
        """The ranks that called what `rank` did, itself among them."""
        return next((ranks for ranks in self.classes if rank in ranks), [])


def group_name(key: str, description: str) -> str:
    """A group for people: by its description where it has one."""
    if description == "default_pg":
        return "the whole world's group"
    return f"group {key.partition(' ')[2] if description in ('', 'undefined') else description}"


def groups_of(dumps: dict[int, Dump], world: int) -> list[Group]:
    """All groups that any rank has called a collective on, by first call."""
    calls: dict[str, dict[int, dict[int, RankCall]]] = {}
    first: dict[str, int] = {}
    for rank, dump in sorted(dumps.items()):
        for call in dump.calls:
            calls.setdefault(call.group, {}).setdefault(rank, {})[call.seq] = call
            first[call.group] = min(first.get(call.group, call.created), call.created)
    groups: list[Group] = []
    for key in sorted(calls, key=lambda key: (first[key], key)):
        known = next((dump.groups[key] for dump in dumps.values() if key in dump.groups), None)
        description, members = known or ("", tuple(sorted(calls[key])))
        if known is None and key.partition(" ")[2] in ("0", "default_pg"):
            description, members = "default_pg", tuple(range(world))
        groups.append(Group(key, description, members, calls[key]))
    return groups


def parting(group: Group, dumps: dict[int, Dump]) -> Parting | None:
    """Return where the members of `group` diverge, or nothing.

    A rank whose ring has overwritten a call counts as having made it. Members without a dump do not count as
    diverging: see `abandoned`.
    """
    present = [rank for rank in group.members if rank in dumps]
    last = {rank: _last_number(group.calls.get(rank, {}), dumps[rank]) for rank in present}
    made = {seq for rank in present for seq in group.calls.get(rank, {})}
    for seq in sorted(made):  # and not all between them: a damaged dump has numbers of any size
        joined = {rank: call for rank in present if (call := group.calls.get(rank, {}).get(seq))}
        absent = tuple(rank for rank in present if last[rank] < seq)
        classes = _classes(joined)
        if len(classes) > 1 or (absent and joined):
            return Parting(group, seq, joined, absent, classes)
    return None


def shifted(found: Parting, dumps: dict[int, Dump]) -> Parting | None:
    """Return where calls were left out or added before `found`, judged by lines and shapes; nothing if none were.

    Calls of equal shape hide a gap from the numbers: all that follow it are one number off, until some rank waits.
    """
    calls = {rank: made for rank, made in found.group.calls.items() if rank in dumps}
    if not calls:
        return None
    begin = max(min(made) for made in calls.values())
    lists = {
        rank: [made[seq] for seq in sorted(made) if seq >= begin] for rank, made in sorted(calls.items())
    }
    usual = min(lists)
    gaps = {rank: first_gap(lists[usual], made) for rank, made in lists.items() if rank != usual}
    place, left_out = min((gap for gap in gaps.values() if gap), default=(0, 0))
    # What a full ring has lost may hold the gap.
    lost = place == 0 and any(dumps[rank].wrapped for rank in calls)
    if not left_out or lost or begin + place >= found.seq:
        return None
    joined = {rank: made[place] for rank, made in lists.items() if place < len(made)}
    odd = [rank for rank, gap in gaps.items() if gap == (place, left_out)]
    classes = [[rank for rank in joined if rank not in odd], odd]
    if len(odd) > len(classes[0]):
        classes, left_out = classes[::-1], -left_out
    return Parting(found.group, begin + place, joined, (), classes, left_out)


def abandoned(group: Group, dumps: dict[int, Dump]) -> Parting | None:
    """The call in which present members wait for those that left no dump, or nothing."""
    dead = tuple(rank for rank in group.members if rank not in dumps)
    waiting = {
        rank: last
        for rank in group.members
        if rank in dumps and (last := _last(dumps[rank].calls)) is not None and last.group == group.key
        if not last.done or dumps[rank].failed
    }
    if not dead or not waiting:
        return None
    seq = max(call.seq for call in waiting.values())
    joined = {rank: call for rank, call in waiting.items() if call.seq == seq}
    return Parting(group, seq, joined, dead, _classes(joined))


def unanswered(dumps: dict[int, Dump]) -> list[Parting]:
    """Sends and receives that wait for a rank which never made the other half."""
    partings: list[Parting] = []
    for rank, dump in dumps.items():
        for call in dump.messages:
            peer = call.peer
            if call.done or peer is None or peer not in dumps or dumps[peer].wrapped or dump.wrapped:
                continue
            mine = [m for m in dump.messages if (m.op, m.peer, m.group) == (call.op, peer, call.group)]
            half = "recv" if call.op == "send" else "send"
            theirs = [m for m in dumps[peer].messages if (m.op, m.peer, m.group) == (half, rank, call.group)]
            number = mine.index(call) + 1
            if len(theirs) < number:
                pair = Group(call.group, "messages", (min(rank, peer), max(rank, peer)), {})
                partings.append(Parting(pair, number, {rank: call}, (peer,), [[rank]]))
                break
    return partings


def _last_number(calls: dict[int, RankCall], dump: Dump) -> int:
    """The number of a rank's last call; one whose ring was full and holds none of the group may have made any."""
    return max(calls, default=1 << 62 if dump.wrapped else 0)


def _classes(joined: dict[int, RankCall]) -> list[list[int]]:
    classes: list[list[int]] = []
    for rank, call in sorted(joined.items()):
        for ranks in classes:
            if conflict(joined[ranks[0]], call) is None:
                ranks.append(rank)
                break
        else:
            classes.append([rank])
    return sorted(classes, key=lambda ranks: (-len(ranks), ranks[0]))


def _last(calls: Iterable[RankCall]) -> RankCall | None:
    return max(calls, key=lambda call: (call.created, call.seq), default=None)
