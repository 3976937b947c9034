"""The last comparison: the first form of the recipe that holds, loaded as its user loads it, ships."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchwright.core.errors import TorchwrightError
from torchwright.core.records import CLEARLY, Interval
from torchwright.optimization.engines.base import ShippingForm
from torchwright.optimization.search.compare import compare
from torchwright.optimization.search.finish import outcome_now, return_to_original
from torchwright.optimization.search.state import Comparison, Outcome, Search
from torchwright.optimization.trial.client import Candidate, TrialFailed

PROCESSES = 3
"""So many fresh processes are asked for the speed-up, where there is time."""


@dataclass(frozen=True, kw_only=True)
class ShippingAttempt:
    """One way to run the recipe for good: an artifact that is written, loaded in a fresh process and timed there."""

    name: ShippingForm
    start: Callable[[], Candidate]
    """Raises `TrialFailed` or a `TorchwrightError` where it cannot be made or run."""
    prove: Callable[[Candidate], None]
    """Measures a form that holds further, after the timing: it leaves another heap. Raises as `start`."""
    again: Callable[[], Candidate | None] = lambda: None
    """Loads the form in one more fresh process, where the result may differ; returns None without time for it."""


def settle(
    search: Search, forms: Sequence[ShippingAttempt]
) -> tuple[Outcome, ShippingAttempt | None, Candidate | None]:
    """The last comparison: the first form of a recipe that holds against the original.

    A form that needs less of the caller comes first, and holds if it is nearly as fast as the recipe was in the search.
    If no form is faster than the original, the recipe has no steps and the other results are missing (None).
    """
    search.tell("stage", "the artifact, loaded in a fresh process, against the original")
    promised, noise = search.proven.total.value, False
    for form in forms:
        candidate: Candidate | None = None
        try:
            candidate = form.start()
            total = _compared(search, candidate).total
            enough = 1.0 if form is forms[-1] else promised / CLEARLY
            if noise := search.budget.objective != "memory" and total.disturbed and total.high > 1.0:
                _not_held(search, form, candidate, f"was {total} in the last comparison: inconclusive")
                continue
            if _holds(search, total, enough):
                total = _over_processes(search, form, candidate, total)
            if held := _holds(search, total, enough):
                form.prove(candidate)
        except TrialFailed as failure:
            _not_held(search, form, candidate, f"failed ({failure.reason})")
            continue
        except TorchwrightError as failure:
            _not_held(search, form, candidate, f"is not to be had ({failure.reason})")
            continue
        except BaseException:
            if candidate is not None:
                candidate.close()
            raise
        if held:
            return outcome_now(search, total, candidate), form, candidate
        _not_held(search, form, candidate, f"was {total} in the last comparison")
    search.notes.append("no form of the recipe held in the last comparison: the original is returned")
    reason = "inconclusive" if noise else "slower than the original"
    return_to_original(search, f"{reason} at the end", "inconclusive" if noise else "removed")
    return outcome_now(search), None, None


def _compared(search: Search, candidate: Candidate) -> Comparison:
    """`candidate` in turn with the original; once more, and longer, where the machine's noise decides nothing."""
    baseline, best = search.baseline, search.best
    search.baseline = search.best = candidate.original or baseline
    try:
        comparison = compare(search, candidate, final=True)
        if comparison.total.high > 1.0 and (comparison.total.low < 1.0 or comparison.total.disturbed):
            comparison = compare(search, candidate, final=True)
        baseline.turns = search.baseline.turns  # what is printed is what was compared
    finally:
        search.baseline, search.best = baseline, best
    return comparison


def _over_processes(search: Search, form: ShippingAttempt, candidate: Candidate, total: Interval) -> Interval:
    """The same over up to `PROCESSES` fresh processes: the speed-up of the middle one, and an interval that spans all.

    How the heap of a process happens to lie decides about page faults, and for all calls of its life: turns in one
    process cannot show that.
    """
    found = [(total, list(candidate.turns), list(search.baseline.turns))]
    while len(found) < PROCESSES and not found[-1][0].busy and (other := form.again()):
        try:
            found.append((_compared(search, other).total, list(other.turns), list(search.baseline.turns)))
        finally:
            other.close()
    found.sort(key=lambda each: each[0].value)
    middle, candidate.turns, search.baseline.turns = found[(len(found) - 1) // 2]
    low, high = min(each.low for each, *_ in found), max(each.high for each, *_ in found)
    busy = any(each.busy for each, *_ in found) or search.context.sampled_load().crowded
    spanning = replace(middle, low=low, high=high, busy=False)
    return spanning.on_busy_machine() if busy else spanning


def _holds(search: Search, total: Interval, enough: float) -> bool:
    if search.budget.objective == "memory":
        return total.high >= 1.0
    return total.value > 1.0 and total.value >= enough


def _not_held(search: Search, form: ShippingAttempt, candidate: Candidate | None, why: str) -> None:
    search.notes.append(f"as {form.name} the recipe {why}")
    if candidate is not None:
        candidate.close()
