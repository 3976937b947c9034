"""The end of a search: drop what no longer contributes, and what held-out data do not allow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from torchwright.core.errors import TorchwrightError
from torchwright.core.records import Interval, Measurement, Quality, Step
from torchwright.optimization.search import estimate, judging
from torchwright.optimization.search.attempt import milder_step
from torchwright.optimization.search.compare import NoTime, compare, is_noise, worth
from torchwright.optimization.search.state import DOUBTFUL, UNCHANGED, Comparison, Outcome, Search
from torchwright.optimization.techniques.base import from_step, in_order
from torchwright.optimization.trial import client as trial
from torchwright.optimization.trial.client import Candidate, TrialFailed

FEW = 30
"""With fewer samples no loss counts as far below the budget: four pictures lost 0.6%, four others 2.6%."""


def ablate(search: Search) -> None:
    """Remove steps that no longer contribute, the smallest gain first; large ones are taken at their word."""
    for rung in search.questioned():
        if rung not in search.questioned():  # with another step gone it is needed, or alone
            continue
        rest = search.without_step(rung.step)
        search.context.deadline = estimate.latest(search, rest)
        if search.context.remaining() < estimate.trial_seconds(search, rest):
            search.notes.append(f"at the end, no time was left to try the recipe without {rung.step}")
            continue
        search.tell("trying", f"the recipe without {rung.step}")
        try:
            candidate, comparison = _measure_smaller(search, rest)
        except (TrialFailed, TorchwrightError) as failure:
            search.notes.append(f"at the end, the recipe without {rung.step} failed ({failure})")
            continue
        if _still_contributes(search, candidate, comparison):
            candidate.close()
            continue
        _remove(search, rung.step, f"without it the recipe is as good ({comparison.marginal})")
        search.promote(candidate, comparison)


def compare_with_third_party(search: Search) -> None:
    """Make the faster one of our own recipe and the third-party engine, if there is one, the best."""
    if search.rival is None:
        return
    rival, proven = search.rival.candidate, search.rival.proven
    search.rival = None
    step, own = rival.steps[-1], search.best.steps
    search.tell("trying", f"{step} beside our own recipe")
    if any(each in search.wanted for each in own):
        comparison, found, loses = proven, "another was asked for", True
    else:
        comparison, found, loses = _compare_recipes(search, rival, proven)
    if loses:
        _remove(search, step, f"beside our own recipe: {found}")
        rival.close()
        return
    for other in own:
        _remove(search, other, f"{step} is faster than all of our own recipe ({found})")
    search.promote(rival, comparison)


def _compare_recipes(search: Search, rival: Candidate, proven: Comparison) -> tuple[Comparison, str, bool]:
    """Compare the third-party engine with our own recipe; return the verdict in words, and whether the engine loses.

    If turns decide nothing, or no time is left for them, the proven speed-ups over the original decide.
    """
    if not search.best.steps:
        return proven, f"{proven.total} where we have none", False
    behind = proven.total.value <= search.proven.total.value
    totals = f"{proven.total} where our own recipe has {search.proven.total}"
    try:
        comparison = compare(search, rival)
    except NoTime:
        return proven, totals, behind
    except TrialFailed as failure:
        return proven, failure.reason, True
    gain = comparison.marginal
    reason = worth(search, rival.steps[-1], rival, comparison)
    likely = gain.high if gain.busy else gain.value  # where others ran the value is the low end
    close = gain.low <= 1.0 < likely or is_noise(search, comparison)
    if reason is not None and search.budget.objective != "memory" and close:
        return comparison, f"{gain}: no gain outside the noise, and {totals}", behind
    return comparison, reason or str(gain), reason is not None


def _measure_smaller(search: Search, steps: tuple[Step, ...]) -> tuple[Candidate, Comparison]:
    """Return a smaller recipe, judged and timed; raises as a trial does, and leaves nothing behind then."""
    candidate = trial.start_candidate(search.context, steps)
    try:
        judging.measure(search, candidate)
        return candidate, compare(search, candidate)
    except BaseException:
        candidate.close()
        raise


def _remove(search: Search, step: Step, reason: str) -> None:
    search.revise(lambda rung: rung.kept and rung.step == step, "removed", reason)


def _still_contributes(search: Search, candidate: Candidate, comparison: Comparison) -> bool:
    if search.over_budget(candidate):
        return True
    if search.budget.objective == "memory":
        return candidate.memory > search.best.memory
    return comparison.marginal.value < 1.0 or is_noise(search, comparison)


def validate_held_out(search: Search) -> None:
    """Judge the recipe by data that chose nothing; while that is over the budget, its costliest step gives way.

    What was chosen by a sample suits that sample a little too well. Far below the budget that decides nothing, and the
    artifact alone is judged so.
    """
    if search.best is search.baseline or not _has_time_to_validate(search):
        return
    search.last_reference = search.baseline.process.ask("observe", unseen=True)
    while search.last_reference is not None and search.best is not search.baseline:
        seen = search.best.quality
        if seen is None:
            return
        few = 0 < seen.samples < FEW
        if seen.drop_high <= DOUBTFUL * search.budget.max_drop and not few:
            return
        found = judging.judge(search, search.best.process, unseen=True)
        if found.drop_high <= search.budget.max_drop:
            return
        reason = f"{found.metric} {found.worsens} by up to {found.drop_high:.2%} on data by which nothing was chosen"
        _remove_costliest(search, reason, found)
        if not _has_time_to_validate(search):
            return


def _has_time_to_validate(search: Search) -> bool:
    """Check whether time is left to judge, and set the deadline to the end of the budget."""
    search.context.deadline = search.last_moment
    return search.context.remaining() > search.settle_seconds


def _remove_costliest(search: Search, reason: str, lost: Quality) -> None:
    """Take the step out after which the metric fell the most; what may take its place does where it pays.

    Back to the original where the recipe cannot be without it.
    """
    before, most, costliest = 0.0, 0.0, search.best.steps[-1]
    for rung in search.rungs:
        if rung.step in search.best.steps and rung.quality is not None:
            if rung.quality.drop - before > most:
                most, costliest = rung.quality.drop - before, rung.step
            before = rung.quality.drop
    search.context.deadline = search.end
    rest = search.without_step(costliest)
    for instead in (*_milder(search, costliest, lost), None):
        steps = in_order([*rest, instead]) if instead else rest
        if not steps:
            continue
        search.tell("trying", f"the recipe with {instead or 'nothing'} in place of {costliest}: {reason}")
        try:
            candidate, comparison = _measure_smaller(search, steps)
        except (TrialFailed, TorchwrightError):
            continue
        if instead and (search.over_budget(candidate) or comparison.total.low <= 1.0):
            candidate.close()
            continue
        if instead:
            search.record(instead, candidate, comparison, "kept", f"the milder one in place of {costliest}")
            # Later rows count from here what their steps cost.
            rows = [rung.step for rung in search.rungs]
            search.rungs.insert(rows.index(costliest), search.rungs.pop())
        _remove(search, costliest, reason)
        search.promote(candidate, comparison)
        return
    return_to_original(search, reason)


def _milder(search: Search, step: Step, lost: Quality) -> Iterator[Step]:
    """A kept step with layers left alone; then a milder variant that paid, or one that was not tried."""
    if alone := _with_layers_left_alone(search, step, lost):
        yield alone
    if other := _fastest_milder(search, step) or _untried_finest(search, step):
        yield other


def _with_layers_left_alone(search: Search, step: Step, lost: Quality) -> Step | None:
    """The step with as many layers left alone as should bring what it lost into the budget, where there is time."""
    technique, steps = from_step(step), search.best.steps
    seconds = estimate.ranking_seconds(search, technique) + estimate.trial_seconds(search, steps)
    again = step not in [each for each, _ in search.description.variants]  # it leaves layers alone already
    if not technique.errors_add or again or seconds > search.context.remaining():
        return None
    found = milder_step(search, step, steps, lost)
    return found and found[0]


def _fastest_milder(search: Search, step: Step) -> Step | None:
    """Return the fastest variant of a kept step that lost less and still adds to the other steps' gains."""
    kept = [rung for rung in search.rungs if rung.kept and rung.step in search.best.steps]
    bold = next(rung for rung in kept if rung.step == step)
    if bold.quality is None:
        return None
    without = math.prod(rung.speedup.value for rung in kept if rung.speedup and rung is not bold)
    milder = [
        (rung.total_speedup.value, rung.step)
        for rung in search.rungs
        if rung.step.name == step.name
        and rung.quality is not None
        and rung.quality.drop < bold.quality.drop
        and rung.total_speedup is not None
        and rung.total_speedup.value > without
    ]
    return max(milder, key=lambda each: each[0], default=(without, None))[1]


def _untried_finest(search: Search, step: Step) -> Step | None:
    """Return the untimed variant of a kept step that rounds least, if its conversion exists.

    YOLOS's search kept OpenVINO's bfloat16 at 2.25x, which lost 1.2% on other data, and ended with the original where
    its float32 would have been 1.15x.
    """
    bold = from_step(step)
    if bold.conversion is None:
        return None
    timed = [rung.step for rung in search.rungs if rung.quality is not None]
    finer = [
        other
        for other, reason in search.description.variants
        if reason is None and other not in timed and from_step(other).conversion == bold.conversion
    ]
    finest = min(finer, key=lambda other: from_step(other).epsilon, default=None)
    return finest if finest and from_step(finest).epsilon < bold.epsilon else None


def finish(search: Search) -> Outcome:
    """Return the outcome; the best and the original stay alive for the last comparison (`settle`)."""
    search.seconds = search.context.clock() - search.start
    return outcome_now(search)


def return_to_original(
    search: Search, reason: str, status: Literal["removed", "inconclusive"] = "removed"
) -> None:
    """Remove every kept step for that reason, and let go of all candidates but the original."""
    search.revise(lambda rung: rung.kept, status, reason)
    if search.rival is not None:
        search.rival.candidate.close()
        search.rival = None
    if search.best is not search.baseline:
        search.best.close()
        search.best, search.proven = search.baseline, UNCHANGED


def outcome_now(search: Search, speedup: Interval | None = None, final: Candidate | None = None) -> Outcome:
    """The search's result as it stands; `final` is what the best became once it was loaded, with its `speedup`."""
    speedup = speedup or search.proven.total
    undecided = any(rung.undecided for rung in search.rungs)
    said = undecided or any("this is the original" in note for note in search.notes)
    if search.best is search.baseline and not said:
        search.notes.append("nothing was both faster and within the accuracy budget: this is the original")
    baseline = search.baseline.measurement()
    measured = final or search.best
    if measured is not search.baseline:
        measured = replace(
            measured,
            quality=measured.quality or search.best.quality,
            memory=measured.memory or search.best.memory,
        )
    return Outcome(
        best=search.best,
        baseline=baseline,
        final=baseline if measured is search.baseline else _scaled_to_ratio(measured, baseline, speedup),
        speedup=speedup,
        rungs=tuple(search.rungs),
        description=search.description,
        seconds=search.seconds,
        notes=tuple(search.notes),
        more_seconds=search.more_seconds,
    )


def _scaled_to_ratio(candidate: Candidate, baseline: Measurement, speedup: Interval) -> Measurement:
    """Return a candidate's times in proportion to the original's by the paired ratio that is claimed.

    The medians of two columns of turns have another ratio than the median of the paired ones where the machine's speed
    changes between rounds: "231 ms → 166 ms 1.01x" contradicts itself.
    """
    found = candidate.measurement()
    factor = baseline.seconds / speedup.value / found.seconds
    cases = tuple(replace(case, seconds=factor * case.seconds) for case in found.cases)
    return replace(found, seconds=factor * found.seconds, cases=cases)
