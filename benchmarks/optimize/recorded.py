"""A search's recipe as an entry of the table of experience, and how soon that search had its gain."""

from __future__ import annotations

import math
from dataclasses import replace

from torchwright.core.records import Recipe, Step, StepResult
from torchwright.optimization.search.choose import is_closed
from torchwright.optimization.search.experience import SearchRecord, Trial, instructions
from torchwright.optimization.techniques.base import from_step

TRIED = ("kept", "removed", "dropped")
"""Statuses of rows of which something was measured."""


def record(recipe: Recipe, model: str, commit: str) -> SearchRecord:
    """Return a search as a record for the table; untried and skipped steps are left out.

    Raises `ValueError` for a search that was continued, tried nothing, or is of before rows had times.
    """
    at, rows = recipe.fingerprint, recipe.rungs
    if recipe.features is None or any(rung.ended_seconds is None or rung.earlier for rung in rows):
        raise ValueError(f"{model}: its rows do not say when they ended in one search")
    if not any(rung.status in TRIED for rung in rows):
        raise ValueError(f"{model}: nothing was tried")
    return SearchRecord(
        model=model,
        machine=at.device.name,
        instructions=instructions(at.device),
        cores=at.device.cores,
        torch=at.torch,
        commit=commit,
        max_drop=recipe.budget.max_drop,
        features=recipe.features,
        trials=_trials(recipe),
    )


def reached(recipe: Recipe) -> float:
    """The speed-up of the search's best, as measured when it was kept."""
    return max((_total(rung) for rung in recipe.rungs if rung.kept), default=1.0)


def wait(recipe: Recipe, share: float) -> tuple[float, int]:
    """Seconds and trials until what was kept had this share of the gain, the speed-up less one, that the search ended
    with."""
    target = 1.0 + share * (reached(recipe) - 1.0)
    rows = [rung for rung in _in_time(recipe) if rung.status in TRIED]
    for count, rung in enumerate(rows, 1):
        if rung.status != "dropped" and _total(rung) >= target:
            return rung.ended_seconds or 0.0, count
    return 0.0, 0


def _trials(recipe: Recipe) -> dict[str, Trial]:
    """Return the result of each tried step; variants of one step that skip layers count as one.

    Where no form of the recipe held at the end, nothing is known of its steps.
    """
    rows = _in_time(recipe)
    told = TRIED if recipe.steps else ("dropped",)
    begun = original = rows[0].ended_seconds or 0.01
    found: dict[str, Trial] = {}
    for rung in rows:
        ended = rung.ended_seconds or begun
        if rung.status in told:
            options = {key: value for key, value in rung.step.options.items() if not isinstance(value, list)}
            name = str(Step(name=rung.step.name, options=options))
            trial = Trial(
                gain=_gain(rung, recipe),
                drop=round(rung.quality.drop_high, 5) if rung.quality else None,
                cost=round(max((ended - begun) / original, 0.01), 2),
            )
            found[name] = _together(found[name], trial) if name in found else trial
        begun = ended
    return found


def _together(one: Trial, other: Trial) -> Trial:
    """The better of two forms of a step, and the time of both."""
    better = max(one, other, key=lambda trial: trial.gain or 0.0)
    return replace(better, cost=round(one.cost + other.cost, 2))


def _gain(rung: StepResult, recipe: Recipe) -> float | None:
    """Return the gain of a step, as `Trial` says; a kept one includes the gains of the variants it replaced."""
    if rung.speedup is None:
        return None
    rows = recipe.rungs
    if is_closed(from_step(rung.step)):
        gain = _total(rung)
    elif rung.kept:
        replaced = [row for row in rows if row.status == "removed" and row.step.name == rung.step.name]
        gain = math.prod(row.speedup.value for row in (rung, *replaced) if row.speedup)
    elif rung.status == "dropped":
        gain = rung.speedup.high
    else:
        own = [
            row for row in rows if row.status in ("kept", "removed") and not is_closed(from_step(row.step))
        ]
        gain = max(map(_total, own)) / reached(recipe)
    return round(gain, 3)


def _total(rung: StepResult) -> float:
    return rung.total_speedup.value if rung.total_speedup else 1.0


def _in_time(recipe: Recipe) -> list[StepResult]:
    return sorted(recipe.rungs, key=lambda rung: rung.ended_seconds or 0.0)
