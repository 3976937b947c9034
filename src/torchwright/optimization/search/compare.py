"""Timing a candidate in turn with the best so far and the original, and what the result is worth."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from torchwright.core.records import CLEARLY, Interval, Step
from torchwright.hardware.measure.clock import Rounds, paired_speedup
from torchwright.optimization.search.state import LATE_SHARE, PATIENCE, Comparison, Search
from torchwright.optimization.techniques.base import from_step
from torchwright.optimization.trial.client import Candidate, TrialFailed
from torchwright.optimization.trial.timed import LONG_SECONDS, TURN_SECONDS

ROUNDS = (9, 25)
"""Fewest and most paired turns of one comparison, those apart in which others ran: of nine no single one moves an end
of the interval beyond the others."""
FEWEST_ROUNDS = 3
"""The fewest rounds, used when turns are very long."""
COMPARE_SECONDS = 5.0
"""Seconds of a comparison. An original of longer turns leaves those of trials: at 36 s it took a third of each."""


Turn = dict[str, float]
"""Kind of call → seconds."""


class NoTime(TrialFailed):
    """A comparison that was not begun, or broken off; every process in it lives on."""


def worth(search: Search, step: Step, candidate: Candidate, comparison: Comparison) -> str | None:
    """Why a candidate within the budget, tried for the sake of `step`, is not kept, or None."""
    if search.budget.objective == "memory":
        if comparison.total.high < 1.0:
            return f"slower than the original ({comparison.total})"
        if candidate.memory > 0.99 * search.best.memory:
            best = mebibytes(search.best.memory)
            return f"{mebibytes(candidate.memory)} peak memory where the best so far has {best}"
        return None
    gain, least = comparison.marginal, from_step(step).least_gain
    if gain.high <= 1.0:
        return f"{gain}: slower"
    if is_noise(search, comparison):
        return f"{gain}: inconclusive, noise may be all of it"
    if gain.low <= 1.0:
        return f"{gain}: no gain outside the noise"
    return f"{gain}: less than the {least:.2f}x that it must bring" if gain.value < least else None


def compare(search: Search, candidate: Candidate, *, final: bool = False) -> Comparison:
    """Time the candidate, the best so far and the original in turn, the last where it takes no long turns.

    Without the original the whole gain is what the candidate adds to that of the best so far.
    """
    others = [search.best] if search.best is not search.baseline and search.best is not candidate else []
    spared = bool(others) and not final and spares_original(search)
    contestants = [*([] if spared else [search.baseline]), *others, candidate]
    # A request that overruns the deadline ends its process, and here that may be the original's or the best
    # recipe's: rounds are begun while the time lasts, and have the time that is kept back to end in. What may be the
    # first find has half of that for rounds, too: without it there is nothing to prove.
    deadline, search.context.deadline = search.context.deadline, search.last_moment
    until = deadline if search.found_any() else (deadline + search.last_moment) / 2
    try:
        rounds = _take_rounds(search, contestants, until, final=final)
    finally:
        search.context.deadline = deadline
    columns = list(zip(*rounds.counted, strict=True))
    for contestant, turns in zip(contestants, columns, strict=True):
        contestant.turns[:] = turns
    seconds = [
        [contestant.seconds(turn) for turn in column]
        for contestant, column in zip(contestants, columns, strict=True)
    ]
    marginal = paired_speedup(seconds[-2], seconds[-1])
    total = search.proven.total.times(marginal) if spared else paired_speedup(seconds[0], seconds[-1])
    if rounds.busy:
        marginal, total = marginal.on_busy_machine(), total.on_busy_machine()
    return Comparison(marginal=marginal, total=total)


def is_noise(search: Search, comparison: Comparison) -> bool:
    """Check whether a candidate's interval is too wide to keep it: its ends are more than twice apart."""
    return search.budget.objective != "memory" and _hides_gain(comparison.marginal)


def spares_original(search: Search) -> bool:
    """Check whether the original's turns are so long that trials skip them once a step is kept."""
    return search.best is not search.baseline and turn_seconds(search.baseline) > COMPARE_SECONDS


def _take_rounds(
    search: Search, contestants: list[Candidate], deadline: float, *, final: bool
) -> Rounds[list[Turn]]:
    """Rounds of one turn each, begun by another contestant each time; disturbed ones are made up for."""
    rounds = Rounds[list[Turn]](enough=ROUNDS[0])
    faster = search.budget.objective != "memory"
    begun = search.context.clock()
    seconds = limit_seconds(search) * (2 if final else 1)
    expected = sum(turn_seconds(contestant) for contestant in contestants)
    while len(rounds.quiet) < ROUNDS[1] and len(rounds.all) < 2 * ROUNDS[1]:
        if search.context.clock() + expected > deadline:
            if len(rounds.all) < FEWEST_ROUNDS:
                raise NoTime("the time budget ended before it was timed", timed_out=True)
            break
        rounds.add(*one_round(contestants, first=len(rounds.all) % len(contestants)))
        spent = search.context.clock() - begun
        expected = spent / len(rounds.all)
        best, candidate = contestants[-2:]
        counted = [(best.seconds(row[-2]), candidate.seconds(row[-1])) for row in rounds.counted]
        if len(counted) > 1 and _hides_gain(paired_speedup(*zip(*counted, strict=True))):
            continue  # only more rounds can tell noise from a gain
        ratios = [best.seconds(row[-2]) / candidate.seconds(row[-1]) for row in rounds.quiet]
        clear = _is_clear(ratios)
        decided = not final and (clear or (faster and statistics.median(ratios or [1.0]) < 1.0))
        if len(ratios) >= ROUNDS[0] and (spent > seconds or decided):
            break
        patience = 1 if clear and not rounds.busy else PATIENCE if final else 2
        if len(rounds.all) >= FEWEST_ROUNDS and spent > patience * seconds:
            break
    return rounds


def limit_seconds(search: Search) -> float:
    """Return the seconds after which a comparison begins no more rounds: few of a small budget."""
    return min(COMPARE_SECONDS, LATE_SHARE * search.budget.time_seconds / 4)


def one_round(contestants: list[Candidate], *, first: int) -> tuple[list[Turn], float]:
    """One turn of each, in their order but begun by another; and the largest share of one that was spent waiting."""
    turns: list[Turn] = [{} for _ in contestants]
    waited = 0.0
    for place in (*range(first, len(contestants)), *range(first)):
        turns[place] = contestants[place].process.ask("time")
        waited = max(waited, contestants[place].process.ask("waited"))
    return turns, waited


def turn_seconds(candidate: Candidate) -> float:
    """Return the expected seconds of a turn, from the last one; short calls repeat for `TURN_SECONDS`."""
    last = candidate.turns[-1] if candidate.turns else {}
    return sum(
        max(seconds, TURN_SECONDS) + (seconds if seconds < LONG_SECONDS else 0.0) for seconds in last.values()
    )


def mebibytes(count: float) -> str:
    return f"{count / 2**20:.0f} MiB"


def _hides_gain(gain: Interval) -> bool:
    """Check whether an interval that may be a gain is too wide to decide anything."""
    return gain.disturbed and gain.high > 1.0


def _is_clear(ratios: Sequence[float]) -> bool:
    """Check whether a few rounds already show which of the last two contestants is faster, whatever noise adds."""
    return bool(ratios) and (min(ratios) > CLEARLY or max(ratios) < 1 / CLEARLY)
