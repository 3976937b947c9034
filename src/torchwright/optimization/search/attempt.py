"""One trial: run, judged, and retreated from where the accuracy budget asks for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from torchwright.core.errors import TorchwrightError
from torchwright.core.records import (
    CLEARLY,
    RELATIVE_ERROR,
    Coverage,
    Interval,
    Quality,
    Ranked,
    Step,
    StepResult,
)
from torchwright.optimization.search import choose, estimate
from torchwright.optimization.search.compare import compare, is_noise, mebibytes, worth
from torchwright.optimization.search.judging import measure
from torchwright.optimization.search.knapsack import packed
from torchwright.optimization.search.state import PATIENCE, Search, Spent
from torchwright.optimization.techniques.base import Technique, compiles, from_step, in_order
from torchwright.optimization.trial import client as trial
from torchwright.optimization.trial.client import Candidate, TrialFailed

IMPLAUSIBLE = 0.05
"""A metric that gets better by more than this was not made faster: it was changed (a mask that leaks, say)."""
LEFT_ALONE = 0.2
"""Share of the modules, most sensitive first, that a quantization over budget leaves alone where errors do not add."""
GROWS_BY_SQUARES = "perplexity"
"""In the name of a metric that grows with the sum of the layers' squared errors, not with its root: a small growth of
perplexity does (the linearity theorem of HIGGS, arXiv:2411.17525)."""
SHOWN = 16
"""Layers of a ranking that a row keeps beyond those that were left alone."""
HOPELESS = 6
"""A drop of so many budgets is not mended by leaving some layers alone."""
FAR_OVER = 1.5
"""A loss of so many budgets is too much, whatever is rounded once less or calibrated on other values."""
FAR_SLOWER = 2.0
"""A candidate whose warm call takes so many times the original's is timed in turns first: its metric would take as many
times as long to measure. Noise alone seldom doubles a call, and turns decide."""
WRONG = 10
"""A loss of so many budgets, and of so many times what the steps declare to lose, is a fault, not rounding.

Lossy steps declare their loss on small models (`Technique.expected_loss`: 10% for 8 bits, 25% for 4), so that 4 bits
on a tiny model raise no false alarm. A batch norm folded without the activation of its subclass lost 89% of ghostnetv2.
"""


def attempt(
    search: Search, step: Step, steps: tuple[Step, ...], swapped: tuple[Step, ...], *, retreats: bool = True
) -> bool:
    """Run one trial and record its verdict; return True when the step, or a milder variant, was kept."""
    search.tell("trying", str(step))
    started = search.context.clock()
    search.context.deadline = estimate.latest(search, steps) - choose.left_to_another(search, step, steps)
    if lost := _lost_uncompiled(search, step, steps):
        quality, coverage = lost
        how = "emulated, and not converted for that" if from_step(step).emulates else "not compiled for that"
        wrong = is_wrong(quality, steps, search.budget.max_drop)
        reason = f"{_over_budget(quality, search.budget.max_drop)}; {how}{_report_of(step, wrong)}"
        search.add(
            StepResult(
                step=step,
                kept=False,
                status="dropped",
                reason=reason,
                quality=quality,
                coverage=coverage,
                wrong=wrong,
            )
        )
        return retreats and _retreat(search, step, steps, quality, swapped)
    candidate: Candidate | None = None
    with ExitStack() as stack:
        try:
            candidate = trial.start_candidate(search.context, steps)
            stack.callback(candidate.close)
            search.spend(candidate, search.context.clock() - started)
            kept = _judge(search, step, candidate, swapped)
        except TrialFailed as failure:
            if failure.timed_out and candidate is None:
                seconds = search.context.clock() - started
                search.spent.append(Spent(steps=steps, seconds=seconds, stopped=True))
            return _failed(search, step, failure, started)
        except TorchwrightError as refusal:
            if candidate is None and step in search.wanted:
                raise
            search.refuse(step, refusal.reason)
            return False
        if kept:
            stack.pop_all()
    if search.over_budget(candidate) and retreats:
        assert candidate.quality is not None
        return _retreat(search, step, steps, candidate.quality, swapped)
    return kept


def _lost_uncompiled(
    search: Search, step: Step, steps: tuple[Step, ...]
) -> tuple[Quality, tuple[Coverage, ...]] | None:
    """Return the loss of a compiled or converted recipe as seen in eager code, if it is far too much, and the coverage.

    None where the loss may be within the budget, or measuring takes too long next to compiling.
    """
    look = PATIENCE * (search.spent[0].seconds + search.settle_seconds)
    if (
        not (compiles(steps) or from_step(step).emulates)
        or from_step(step).tolerance <= search.budget.max_drop
        or look > estimate.afresh_seconds(search, steps)
    ):
        return None
    deadline = search.context.deadline
    search.context.deadline = min(deadline, search.context.clock() + look)
    try:
        with trial.TrialProcess(search.context, trial.environment_of(steps)) as process:
            prepared = process.ask("prepare", steps=steps, compiled=False)
            quality: Quality = process.ask("compare", reference=search.reference)
    except (TrialFailed, TorchwrightError):
        return None  # compiling it will say why
    finally:
        search.context.deadline = deadline
    return (quality, prepared.coverage) if quality.drop > FAR_OVER * search.budget.max_drop else None


def _judge(search: Search, step: Step, candidate: Candidate, swapped: tuple[Step, ...]) -> bool:
    """Judge and time a candidate, and record the verdict; the caller closes one that is not kept."""
    if _seems_slow(search, step, candidate):
        comparison = compare(search, candidate)
        if comparison.marginal.high < 1.0 and (verdict := worth(search, step, candidate, comparison)):
            candidate.measure_memory()
            search.record(step, candidate, comparison, "dropped", f"{verdict}; its loss was not measured")
            return False
    measure(search, candidate)
    if unfit := _unfit(search, step, candidate):
        reason, wrong = unfit
        search.record(step, candidate, None, "dropped", reason, wrong=wrong)
        return False
    comparison = compare(search, candidate)
    if _is_undecided(comparison.marginal):
        comparison = compare(search, candidate, final=True)
    verdict = worth(search, step, candidate, comparison)
    gain, noise = comparison.marginal, is_noise(search, comparison)
    if verdict is not None and (noise or gain.high <= 1.0 or not _asked_for(search, step)):
        search.record(step, candidate, comparison, "inconclusive" if noise else "dropped", verdict)
        return False
    reason = f"{gain.value:.2f}x faster" if verdict is None else f"asked for; {verdict}"
    if verdict is not None and gain.value < 1.0:
        reason = f"{gain.value:.2f}x: slower, kept because requested"
    if search.budget.objective == "memory":
        reason = f"{mebibytes(search.best.memory - candidate.memory)} less memory"
    if swapped:
        reason += f", in place of {', '.join(map(str, swapped))}"
        why = f"then replaced by {step}"
        search.revise(lambda rung: rung.kept and rung.step in swapped, "removed", why, adds=True)
    company = [other for other in candidate.steps if other != step and other not in search.best.steps]
    search.revise(lambda rung: rung.was_slow and rung.step in company, "kept", f"kept for {step}", adds=True)
    for other in company:
        if not any(rung.kept and rung.step == other for rung in search.rungs):
            search.add(StepResult(step=other, kept=True, status="kept", reason=f"tried with {step}"))
    search.record(step, candidate, comparison, "kept", reason)
    search.promote(candidate, comparison)
    return True


def _seems_slow(search: Search, step: Step, candidate: Candidate) -> bool:
    """Check whether a call took so much longer than the original's that the metric is not worth measuring first."""
    if search.budget.objective == "memory" or _asked_for(search, step):
        return False
    warm = candidate.seconds(candidate.process.ask("warm_seconds"))
    return warm > FAR_SLOWER * search.pass_seconds(search.baseline)


def _unfit(search: Search, step: Step, candidate: Candidate) -> tuple[str, bool] | None:
    """Why the metric alone drops a candidate, and whether no rounding explains that; or None."""
    quality, budget = candidate.quality, search.budget.max_drop
    assert quality is not None
    if search.over_budget(candidate):
        wrong = is_wrong(quality, candidate.steps, budget)
        return _over_budget(quality, budget) + _report_of(step, wrong), wrong
    if (lost := _lost_on_other_values(search, candidate)) is not None:
        return f"{_over_budget(lost, budget)}, on inputs of another size than calibrated it", False
    if quality.drop < -max(IMPLAUSIBLE, 2 * budget):
        return f"{quality.metric} improves by {-quality.drop:.2%}: not the same function", False
    return None


def _lost_on_other_values(search: Search, candidate: Candidate) -> Quality | None:
    """The metric of a calibrated recipe on other values than calibrated it, where it is far over the budget."""
    if not any(from_step(step).calibrates for step in candidate.steps):
        return None
    if search.varied_reference is None:
        return None
    found: Quality = candidate.process.ask("compare", reference=search.varied_reference, varied=True)
    return found if found.drop > FAR_OVER * search.budget.max_drop else None


def _retreat(
    search: Search, step: Step, steps: tuple[Step, ...], lost: Quality, swapped: tuple[Step, ...]
) -> bool:
    """Try the step with its most sensitive modules left alone; return True when that is kept."""
    ranking_seconds = estimate.ranking_seconds(search, from_step(step))
    hopeless = lost.drop > HOPELESS * search.budget.max_drop
    if hopeless or estimate.no_time(search, steps, before=ranking_seconds):
        return False
    found = milder_step(search, step, steps, lost)
    if found is None or estimate.no_time(search, steps):
        return False
    milder, count, ranking = found
    search.tell("trying", f"{step.name} without the {count} most sensitive of {len(ranking)} modules")
    rest = [kept for kept in steps if kept != step]
    kept = attempt(search, milder, in_order([*rest, milder]), swapped, retreats=False)
    shown = tuple(ranking[: count + SHOWN])
    search.rungs[-1] = replace(search.rungs[-1], ranking=shown, ranked=len(ranking))
    return kept


def milder_step(
    search: Search, step: Step, steps: Sequence[Step], lost: Quality
) -> tuple[Step, int, Sequence[Ranked]] | None:
    """Rank the modules that `step` changes in a recipe of these steps, and leave the worst alone, which lost this much.

    Returns the milder step, the number of modules left alone, and the ranking, which begins with them. None, and a
    note, where they cannot be ranked; None where none or all of them would have to be left alone.
    """
    technique = from_step(step)
    if technique.retreat(()) is None:
        return None
    try:
        with trial.TrialProcess(search.context) as process:
            ranking = process.ask("sensitivity", steps=(*_ground(technique, steps), step))
    except (TrialFailed, TorchwrightError) as failure:
        search.notes.append(f"{step}: no retreat, its layers could not be ranked ({failure})")
        return None
    alone = left_alone(technique, ranking, lost, search.budget.max_drop)
    ranking = [*alone, *(each for each in ranking if each not in alone)]
    milder = technique.retreat(tuple(each.name for each in alone))
    return (milder.step(), len(alone), ranking) if milder and 0 < len(alone) < len(ranking) else None


def left_alone(
    technique: Technique, ranking: Sequence[Ranked], lost: Quality, budget: float
) -> Sequence[Ranked]:
    """Return the modules to leave alone after such a loss; all of them where no choice is enough.

    Where errors add up, those are left alone that cost the least time; elsewhere the worst.
    """
    if not technique.errors_add:
        return ranking[: max(1, round(LEFT_ALONE * len(ranking)))]
    errors = _as_lost([each.error for each in ranking], technique, lost)
    between = max(lost.drop**2 - math.hypot(*errors) ** 2, 0.0) if technique.rounds_between else 0.0
    # The upper end of what the rest loses is judged.
    allowed = budget * min(lost.drop / lost.drop_high, 1.0) / CLEARLY
    squared = allowed * lost.drop if GROWS_BY_SQUARES in lost.metric.lower() else allowed**2
    seconds = [1.0 if each.seconds is None else each.seconds for each in ranking]
    # The last first: of modules that are alike, the least sensitive are changed.
    changed = packed(seconds[::-1], [error**2 for error in errors[::-1]], squared - between)[::-1]
    return [each for each, change in zip(ranking, changed, strict=True) if not change] or ranking[:1]


def _as_lost(errors: Sequence[float], technique: Technique, lost: Quality) -> list[float]:
    """Return the layers' errors in the unit of the metric, or, where only their shares are known, as large as the loss.

    Shares alone are known where calibration chose ranges that the stand-ins do not have, or where the metric is not
    the relative error. Other metrics than those known for it may grow with the square of the error: then more layers
    than need be are left alone, not fewer.
    """
    together = math.hypot(*errors)
    if not together or (lost.metric == RELATIVE_ERROR and not technique.calibrates):
        return list(errors)
    return [error * lost.drop / together for error in errors]


def _asked_for(search: Search, step: Step) -> bool:
    named = step.name in {wanted.name for wanted in search.wanted}
    return search.budget.objective != "memory" and named and not search.has_variant(step)


def _ground(technique: Technique, steps: Sequence[Step]) -> tuple[Step, ...]:
    """Those of `steps` that make the model into what `technique` changes."""
    return tuple(
        step
        for step in steps
        if from_step(step).gives & technique.needs - {"compiled"} and step.name != technique.name
    )


def _is_undecided(gain: Interval) -> bool:
    """Check whether noise hides a possible gain: a longer comparison costs less than another trial."""
    return gain.high > 1.0 and (gain.disturbed or (gain.low <= 1.0 and gain.value >= choose.SMALL_GAIN))


def _failed(search: Search, step: Step, failure: TrialFailed, started: float) -> bool:
    if failure.timed_out:
        seconds = search.context.clock() - started
        search.refuse(step, f"stopped after {seconds:.0f} s, when the time for trials ended", "untried")
    else:
        search.refuse(step, failure.reason, "failed")
    return False


def is_wrong(quality: Quality, steps: Sequence[Step], budget: float) -> bool:
    """Check for a loss that no rounding of these steps explains: one of them changes what the model computes."""
    expected = max((from_step(step).expected_loss for step in steps), default=0.0)
    return quality.drop > WRONG * max(budget, expected)


def _report_of(step: Step, wrong: bool) -> str:
    return f"; the rewrite of {step.name} is wrong for this model: please report" if wrong else ""


def _over_budget(quality: Quality, budget: float) -> str:
    """By how much, in as many digits as show that it is more than the budget; and whether more data might say less."""
    digits = next((n for n in range(2, 6) if f"{quality.drop_high:.{n}%}" != f"{budget:.{n}%}"), 6)
    drop, high = f"{quality.drop:.{digits}%}", f"{quality.drop_high:.{digits}%}"
    few = f" by {quality.samples:,} samples; more may say less" if quality.drop <= budget else ""
    return f"{quality.metric} {quality.worsens} by {drop} (up to {high}{few}), the budget is {budget:.2%}"
