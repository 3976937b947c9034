"""The search: try a technique, keep it only if it pays and stays within the budget, and say why.

1. The original is measured, then what an earlier search has found. The time budget starts then.
2. What cannot run or cannot pay is refused.
3. What fits the time is tried, by expected gain a second; a quantization that overshoots retreats layer by layer.
   Experience with other models has its say in what is expected.
4. If nothing fitted, the time budget is stretched until one promising candidate is measured.
5. Our own recipe takes turns with the best third-party engine, if one was found.
6. What no longer contributes is dropped.
7. Held-out data judge the best where it is near the budget.

Writing the artifact and proving it is another room's (`proof`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from torchwright.core.errors import RefusedTechnique, TorchwrightError
from torchwright.core.process import interrupts
from torchwright.core.records import RELATIVE_ERROR, Step
from torchwright.optimization.search import choose, components, estimate, experience, resume
from torchwright.optimization.search.asked import given_by, raise_refused
from torchwright.optimization.search.attempt import attempt
from torchwright.optimization.search.finish import (
    ablate,
    compare_with_third_party,
    finish,
    return_to_original,
    validate_held_out,
)
from torchwright.optimization.search.state import Outcome, Search, Spent
from torchwright.optimization.techniques.base import Technique, from_step, in_order
from torchwright.optimization.trial import client as trial
from torchwright.optimization.trial.client import TrialFailed
from torchwright.optimization.trial.threads import settle_threads


def run(search: Search) -> Outcome:
    """Run the whole search. The time budget starts when the original has been measured.

    From then on the search returns a result: the original, if a process is lost without which the search cannot go on.

    Raises `ModelError` or `WorkloadError` if the original cannot be run or judged, and `RefusedTechnique` if a
    technique requested by name cannot run. Raises `ArtifactError` if the search to continue was of another model.
    """
    search.begin()
    search.tell("baseline", "measuring the original")
    _measure_baseline(search)
    search.original_seconds = search.context.clock() - search.begun
    search.start_budget()
    _recall(search)
    try:
        queue = search.queue = choose.first_queue(search, resume.restore(search))
        search.start_budget()  # the techniques are imported now: 16 s at a load of 31 on two cores
        while queue:
            interrupts.check()
            queue += _try(search, *choose.take(search, queue))
        _try_at_least_one(search)
        compare_with_third_party(search)
        ablate(search)
        validate_held_out(search)
        search.more_seconds = choose.untried_seconds(search)
        return finish(search)
    except TrialFailed as failure:
        search.notes.append(f"the search ended early: {failure.reason}")
        return_to_original(search, f"the search ended early: {failure.reason}")
        return finish(search)
    except BaseException:
        search.close_all()
        raise


def _measure_baseline(search: Search) -> None:
    clock = search.context.clock
    begun = clock()
    try:
        search.context.warm_up()
        search.import_seconds = clock() - begun
        begun = clock()
        search.baseline = search.best = trial.start_candidate(search.context, (), essential=True)
    except TrialFailed as failure:
        raise _baseline_error(failure) from failure
    try:
        process = search.baseline.process
        search.spent.append(Spent(steps=(), seconds=clock() - begun))
        _check_asked(search)
        if search.earlier is None and (choice := settle_threads(search.context, search.baseline)):
            search.notes.append(f"measured with {choice}")
            search.tell("notice", search.notes[-1])
        search.baseline.turn()
        search.context.patience = estimate.patience(search)
        begun = clock()
        search.baseline.measure_memory()
        search.reference = process.ask("observe")
        search.baseline.quality = process.ask("compare", reference=search.reference, itself=True)
        search.settle_seconds = clock() - begun
        search.description = process.ask("describe", names=_asked(search))
    except TrialFailed as failure:
        search.baseline.close()
        raise _baseline_error(failure) from failure
    except BaseException:
        search.baseline.close()
        raise


def _check_asked(search: Search) -> None:
    """Raise `RefusedTechnique` for a step asked for by name that the model, now built, does not allow."""
    if asked := (*search.wanted, *search.served):
        given = given_by(asked, search.only, search.without)
        raise_refused(search.baseline.process.ask("refusals", steps=asked, given=given))


def _recall(search: Search) -> None:
    """Find what other searches say of a model like this one, on a machine like this one.

    Their losses are relative errors: a task's metric may allow a step that changes the outputs by more.
    """
    description, judged = search.description, search.baseline.quality
    by_error = judged is not None and judged.metric == RELATIVE_ERROR
    search.experience = experience.near(
        search.records,
        description.features,
        description.device,
        search.budget.max_drop if by_error else math.inf,
    )
    if search.experience.near:
        models = [record.model for _, record in search.experience.near]
        search.tell("notice", f"ordered by experience with {len(models)} models, {models[0]} the nearest")


def _baseline_error(failure: TrialFailed) -> TorchwrightError:
    what, wait = "cannot be run", ""
    if failure.timed_out:
        what, wait = "does not answer", "; a larger --time-budget waits longer"
    return TorchwrightError(
        f"the original model {what}",
        found=failure.reason,
        next=f"run it on its inputs in plain PyTorch first{wait}",
    )


def _asked(search: Search) -> tuple[str, ...] | None:
    """The techniques that the model is asked about; None is all."""
    return tuple(step.name for step in search.wanted) if search.only else None


def _try_at_least_one(search: Search) -> None:
    """Stretch the time budget where it has left every candidate unmeasured, until one is measured."""
    begun: list[Step] = []
    while not search.measured_any():
        step = choose.most_promising(search, begun)
        if step is None:
            return
        begun.append(step)
        _stretch(search, step, choose.plan(search, step))
        _try(search, step)


def _stretch(search: Search, step: Step, steps: tuple[Step, ...]) -> None:
    """Give a trial of `steps`, for the sake of one of them, the time that it needs, and say why it had none."""
    seconds = estimate.lacking_seconds(search, steps)
    if seconds <= 0.0:
        return
    search.stretch(seconds)
    load = search.context.load()
    why = f"machine busy: {load}" if load.slowdown > 1.0 else "no trial fits it"
    text = f"the time budget was stretched by {seconds:.0f} s to try {step}: {why}"
    search.notes.append(text)
    search.tell("notice", text)


def _try(search: Search, step: Step, giver: Step | None = None) -> list[Step]:
    """Try one step on top of the best recipe, with an untried one that gives what it needs; return steps to try next.

    A step that nothing can build on is compared with other such steps, apart from our own recipe.
    """
    if choose.is_closed(from_step(step)):
        with search.among_rivals():
            return _try_on_best(search, step)
    if giver is not None:
        return _try_both(search, step, giver)
    return _try_on_best(search, step)


def _try_both(search: Search, step: Step, giver: Step) -> list[Step]:
    """Try two steps in one trial; where they are not kept, the giver is tried alone, and what it can change again."""
    if attempt(search, step, in_order([*search.best.steps, giver, step]), ()):
        return choose.second_chances(search) if choose.changes_verdicts(from_step(giver)) else []
    return _try_on_best(search, giver)


def _try_on_best(search: Search, step: Step) -> list[Step]:
    technique, asked = from_step(step), step in search.wanted and not search.has_variant(step)
    if not asked and (reason := _refusal(search, technique, step)):
        search.refuse(step, reason)
        return []
    steps, swapped = choose.with_step(search, technique, step)
    steps = steps or choose.in_company(search, technique, step)
    if steps is None:
        _refuse_lacking(search, technique, step)
        return []
    late = estimate.no_time(search, steps)
    if late and not asked:
        search.refuse(step, late, "untried")
        return []
    if late and not search.measured_any():
        _stretch(search, step, steps)
    if attempt(search, step, steps, swapped) and choose.changes_verdicts(technique):
        return choose.second_chances(search)
    return []


def _refusal(search: Search, technique: Technique, step: Step) -> str | None:
    have = search.have()
    whole = not technique.components
    if whole and technique.gives and technique.gives <= have and not search.has_variant(step):
        return f"the model is {' and '.join(sorted(technique.gives))} already"
    engine = choose.engine_in_the_way(search, technique)
    if engine is not None:
        needs = ", ".join(sorted(technique.required - have)).replace("_", " ")
        return f"{engine} runs the model on code of its own, which this cannot change (needs: {needs})"
    return components.cannot_pay(search, technique, step) or choose.cannot_pay(search, technique)


def _refuse_lacking(search: Search, technique: Technique, step: Step) -> None:
    lacks, giver = choose.lacks(search, technique), choose.untried_giver(search, technique)
    if giver is not None:
        search.add(replace(giver, step=step, reason=f"{lacks}, which {giver.step} would give"))
    elif step in search.wanted:
        raise RefusedTechnique(f"{step} was asked for and cannot run here", found=lacks)
    else:
        search.refuse(step, lacks)
