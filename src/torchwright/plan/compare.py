"""Timing a candidate in turn with the best so far and the original, and what the result is worth."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from torchwright.measure.clock import paired_speedup
from torchwright.plan.state import FINISH_SHARE, Comparison, Search
from torchwright.plan.trial import Candidate, TrialFailed
from torchwright.plan.worker import TURN_SECONDS

MIN_GAIN = 1.01
"""A step must gain one per cent, and its whole interval must lie above 1."""
ROUNDS = (7, 25)
"""Fewest and most paired turns of one comparison."""
FEWEST_ROUNDS = 3
"""Where turns are very long."""
COMPARE_SECONDS = 5.0


class NoTime(TrialFailed):
    """A comparison that was not begun, or broken off; every process in it lives on."""


def worth(search: Search, candidate: Candidate, comparison: Comparison) -> str | None:
    """Why a candidate within the budget is not kept, or None."""
    if search.budget.objective == "memory":
        if comparison.total.high < 1.0:
            return f"slower than the original ({comparison.total})"
        if candidate.memory > 0.99 * search.best.memory:
            best = mebibytes(search.best.memory)
            return f"{mebibytes(candidate.memory)} peak memory where the best so far has {best}"
        return None
    gain = comparison.marginal
    if gain.low <= 1.0 or gain.value < MIN_GAIN:
        return f"{gain}: no gain outside the noise" if gain.high > 1.0 else f"{gain}: slower"
    return None


def compare(search: Search, candidate: Candidate, *, final: bool = False) -> Comparison:
    """Time the candidate, the best so far and the original in turn."""
    contestants = [search.baseline, candidate]
    if search.best is not search.baseline and search.best is not candidate:
        contestants.insert(1, search.best)
    rows: list[list[float]] = []
    faster = search.budget.objective != "memory"
    begun = search.context.clock()
    seconds = min(COMPARE_SECONDS, FINISH_SHARE * search.budget.time_seconds / 2) * (1.6 if final else 1)
    one_round = sum(turn_seconds(contestant) for contestant in contestants)
    # A request that overruns the deadline ends its process, and here that may be the original's or the best
    # recipe's: rounds are begun while the time lasts, and have the time that is kept back to end in.
    deadline, search.context.deadline = search.context.deadline, search.last_moment
    try:
        while len(rows) < ROUNDS[1]:
            if search.context.clock() + one_round > deadline:
                if len(rows) < FEWEST_ROUNDS:
                    raise NoTime("the time budget ended before it was timed", timed_out=True)
                break
            rows.append([search.objective(contestant.turn()) for contestant in contestants])
            spent = search.context.clock() - begun
            one_round = spent / len(rows)
            decided = not final and (_is_clear(rows) or (faster and _is_futile(rows)))
            if len(rows) >= ROUNDS[0] and (spent > seconds or decided):
                break
            if len(rows) >= FEWEST_ROUNDS and spent > seconds and (spent > 2 * seconds or _is_clear(rows)):
                break
    finally:
        search.context.deadline = deadline
    for contestant in contestants:
        del contestant.turns[: -len(rows)]
    columns = list(zip(*rows, strict=True))
    best = columns[1] if len(contestants) == 3 else columns[0]
    return Comparison(
        marginal=paired_speedup(best, columns[-1]), total=paired_speedup(columns[0], columns[-1])
    )


def turn_seconds(candidate: Candidate) -> float:
    """What a turn will take at most, from the last one: a call not counted, then `TURN_SECONDS` or one call."""
    last = candidate.turns[-1] if candidate.turns else {}
    return sum(seconds + max(seconds, TURN_SECONDS) for seconds in last.values())


def mebibytes(count: float) -> str:
    return f"{count / 2**20:.0f} MiB"


def _is_futile(rows: Sequence[Sequence[float]]) -> bool:
    """Whether the last contestant is slower than the one before it more often than not: no gain will come of more."""
    return statistics.median(row[-2] / row[-1] for row in rows) < 1.0


def _is_clear(rows: Sequence[Sequence[float]]) -> bool:
    """Whether a few rounds already say which of the last two contestants is faster, and by more than a tenth."""
    ratios = [row[-2] / row[-1] for row in rows]
    return min(ratios) > 1.1 or max(ratios) < 0.9
