"""Locate where two ranks' calls on one group diverge: the least edits that turn one sequence into the other."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from torchwright.train.hang.calls import RankCall, conflict

GAP, OTHER, LEFT = 2, 3, 1
"""Costs of a call that only one side made; of two different calls in one place; and, at the end, of any number of
calls that one side has not reached yet. So a gap is found where the calls after it fit, and at the end there is no
gap."""
MOST = 200
"""The cost above which the two are not compared."""

_Edit = tuple[int, int, int, int]
"""Calls done by one and by the other before it, and in it."""


def first_gap(one: Sequence[RankCall], other: Sequence[RankCall]) -> tuple[int, int] | None:
    """Return (index, count): the first calls that `other` left out (or, below 0, added) before both went on alike.

    Calls match if they come from the same lines and do not contradict each other. None if there is no such gap: the
    least edits put it as late as they can.
    """
    edits = _least_edits(one, other)
    for place, (i, j, by_one, by_other) in enumerate(edits):
        if by_one == by_other:
            continue
        count = 1
        for later in edits[place + 1 :]:
            if later != (i + count * by_one, j + count * by_other, by_one, by_other):
                break
            count += 1
        after = (i + count * by_one, j + count * by_other)
        goes_on = after[0] < len(one) and after[1] < len(other) and after not in {edit[:2] for edit in edits}
        return (i, count * (by_one - by_other)) if goes_on else None
    return None


def _least_edits(one: Sequence[RankCall], other: Sequence[RankCall]) -> tuple[_Edit, ...]:
    """Dijkstra's algorithm over the calls done on either side; of equal ways that with the latest first gap."""
    numbers: dict[object, int] = {}
    lines = [[numbers.setdefault(call.path, len(numbers)) for call in calls] for calls in (one, other)]
    end = len(one), len(other)
    seen: set[tuple[int, int]] = set()
    ways: list[tuple[int, int, int, int, tuple[_Edit, ...]]] = [(0, -sum(end), 0, 0, ())]
    while ways:
        paid, late, i, j, edits = heapq.heappop(ways)
        while i < end[0] and j < end[1] and lines[0][i] == lines[1][j] and not conflict(one[i], other[j]):
            i, j = i + 1, j + 1
        if (i, j) == end:
            return edits
        if (i, j) in seen or paid > MOST:
            continue
        seen.add((i, j))
        if i == end[0] or j == end[1]:
            heapq.heappush(ways, (paid + LEFT, late, *end, edits))
            continue
        gap = late if late > -sum(end) else -i
        for cost, first, by_one, by_other in ((OTHER, late, 1, 1), (GAP, gap, 1, 0), (GAP, gap, 0, 1)):
            edit = (i, j, by_one, by_other)
            heapq.heappush(ways, (paid + cost, first, i + by_one, j + by_other, (*edits, edit)))
    return ()
