"""The end of a search: drop what no longer contributes, and compare the best with the original once more."""

from __future__ import annotations

from dataclasses import replace

from torchwright.errors import TorchwrightError
from torchwright.facts import Interval
from torchwright.plan import trial
from torchwright.plan.compare import ROUNDS, NoTime, compare, turn_seconds
from torchwright.plan.state import Comparison, Outcome, Search
from torchwright.plan.trial import Candidate, TrialFailed
from torchwright.techniques.base import from_step

CONTRIBUTES = 1.3
"""A step with at least this marginal speed-up is not questioned by the drop-one pass."""


def drop_one(search: Search) -> None:
    """Remove steps that no longer contribute; those whose own gain was large are taken at their word."""
    for rung in [rung for rung in search.rungs if rung.kept]:
        if len(search.best.steps) < 2 or (rung.speedup and rung.speedup.value >= CONTRIBUTES):
            continue
        rest = tuple(step for step in search.best.steps if step != rung.step)
        needed = from_step(rung.step).gives & frozenset[str]().union(*(from_step(s).needs for s in rest))
        if needed or rung.step in search.wanted or rung.step not in search.best.steps:
            continue
        if search.no_time(from_step(rung.step)):
            search.notes.append(f"drop-one pass: no time left to try the recipe without {rung.step}")
            continue
        search.tell("trying", f"the recipe without {rung.step}")
        try:
            candidate = trial.start_candidate(search.context, rest, list(search.repeats))
        except (TrialFailed, TorchwrightError) as failure:
            search.notes.append(f"drop-one pass: the recipe without {rung.step} failed ({failure})")
            continue
        try:
            candidate.settle(search.reference)
            comparison = compare(search, candidate)
        except (TrialFailed, TorchwrightError) as failure:
            candidate.close()
            search.notes.append(f"drop-one pass: the recipe without {rung.step} failed ({failure})")
            continue
        except BaseException:
            candidate.close()
            raise
        if _still_contributes(search, candidate, comparison):
            candidate.close()
            continue
        reason = f"without it the recipe is as good ({comparison.marginal})"
        search.rungs = [
            replace(r, kept=False, status="removed", reason=reason) if r is rung else r for r in search.rungs
        ]
        search.promote(candidate, comparison)


def _still_contributes(search: Search, candidate: Candidate, comparison: Comparison) -> bool:
    if search.over_budget(candidate):
        return True
    if search.budget.objective == "memory":
        return candidate.memory > search.best.memory
    return comparison.marginal.value < 1.0


def finish(search: Search) -> Outcome:
    search.tell("stage", "best against the original once more")
    search.context.deadline = search.last_moment
    comparison = None if search.best is search.baseline else _last_comparison(search)
    if comparison is None:
        while len(search.baseline.turns) < ROUNDS[0] and _time_for_a_turn(search, search.baseline):
            search.baseline.turn()
    if search.best is search.baseline:
        search.notes.append("nothing was both faster and within the accuracy budget: this is the original")
    else:
        search.baseline.close()
    one = Interval(value=1.0, low=1.0, high=1.0)
    baseline = search.baseline.measurement(search.repeats)
    return Outcome(
        best=search.best,
        baseline=baseline,
        final=baseline if search.best is search.baseline else search.best.measurement(search.repeats),
        speedup=one if comparison is None else comparison.total,
        rungs=tuple(search.rungs),
        description=search.description,
        seconds=search.context.clock() - search.start,
        notes=tuple(search.notes),
    )


def _last_comparison(search: Search) -> Comparison | None:
    """The best against the original once more; None, and the original is the best, where it did not hold."""
    try:
        comparison = compare(search, search.best, final=True)
    except NoTime:
        comparison = search.proven
        search.notes.append(
            "no time was left for a last comparison: the speed-up is that of the trial itself"
        )
    except TrialFailed as failure:
        _give_up(search, f"the recipe failed in the last comparison ({failure.reason})", failure.reason)
        return None
    total = comparison.total
    if total.high < 1.0 if search.budget.objective == "memory" else total.value <= 1.0:
        _give_up(
            search, f"the recipe was {total} in the last comparison", "slower than the original at the end"
        )
        return None
    return comparison


def _give_up(search: Search, note: str, reason: str) -> None:
    """Return to the original."""
    search.notes.append(f"{note}: the original is returned")
    search.rungs = [
        replace(rung, kept=False, status="removed", reason=reason) if rung.kept else rung
        for rung in search.rungs
    ]
    search.best.close()
    search.best = search.baseline


def _time_for_a_turn(search: Search, candidate: Candidate) -> bool:
    return search.context.remaining() > 1.5 * turn_seconds(candidate)
