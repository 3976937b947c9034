"""The search: try a technique, keep it only if it pays and stays within the budget, and say why.

baseline → refuse what cannot run or cannot pay → greedy over phases (retreating layer by layer where a
quantization overshoots) → drop what no longer contributes → best against the original once more
"""

from __future__ import annotations

from torchwright.errors import TorchwrightError
from torchwright.facts import Step
from torchwright.plan import choose, trial
from torchwright.plan.attempt import attempt
from torchwright.plan.finish import drop_one, finish
from torchwright.plan.state import FINISH_SHARE, OVERRUN_SHARE, Outcome, Search
from torchwright.plan.trial import TrialFailed
from torchwright.process import interrupts
from torchwright.techniques.base import from_step


def run(search: Search) -> Outcome:
    """The whole search.

    Raises `ModelError` or `WorkloadError` when the original cannot be run or judged, `RefusedTechnique` when a
    technique asked for by name cannot run.
    """
    search.start = search.context.clock()
    search.context.deadline = search.start + search.budget.time_seconds * (1 - FINISH_SHARE)
    search.last_moment = search.start + search.budget.time_seconds * (1 + OVERRUN_SHARE)
    search.tell("baseline", "measuring the original")
    _measure_baseline(search)
    try:
        queue = choose.first_queue(search)
        while queue:
            interrupts.check()
            queue = _try(search, queue.pop(0), queue)
        drop_one(search)
        return finish(search)
    except TrialFailed as failure:
        search.close_all()
        raise TorchwrightError(
            "the original stopped working in the middle of the search", found=failure.reason
        ) from failure
    except BaseException:
        search.close_all()
        raise


def _measure_baseline(search: Search) -> None:
    try:
        search.baseline = search.best = trial.start_candidate(search.context, (), ())
    except TrialFailed as failure:
        raise _baseline_error(search, failure) from failure
    try:
        process = search.baseline.process
        search.baseline.turn()
        answer = process.ask("memory")
        search.baseline.memory = answer["peak"]
        search.reference = process.ask("observe")
        search.baseline.quality = process.ask("compare", reference=search.reference, itself=True)
        search.description = process.ask("describe")
        search.repeats = search.description["repeats"]
    except TrialFailed as failure:
        search.baseline.close()
        raise _baseline_error(search, failure) from failure
    except BaseException:
        search.baseline.close()
        raise


def _baseline_error(search: Search, failure: TrialFailed) -> TorchwrightError:
    if failure.timed_out:
        return TorchwrightError(
            "the time budget ended before the original was measured",
            found=f"{search.budget.time_seconds:.0f} s",
            next="a larger --time-budget",
        )
    return TorchwrightError(
        "the original model cannot be run",
        found=failure.reason,
        next="run it on its inputs in plain PyTorch first",
    )


def _try(search: Search, step: Step, queue: list[Step]) -> list[Step]:
    """Try one step on top of the best recipe; returns what is left to try."""
    technique = from_step(step)
    if choose.tried_already(search, step):
        return queue
    have = search.have()
    if technique.gives and technique.gives <= have and step not in search.wanted:
        search.refuse(step, f"the model is {' and '.join(sorted(technique.gives))} already")
        return queue
    engine = choose.engine_in_the_way(search, technique)
    if engine is not None and step not in search.wanted:
        needs = ", ".join(sorted(technique.needs - have)).replace("_", " ")
        search.refuse(
            step, f"{engine} runs the model on code of its own, which this cannot change (needs: {needs})"
        )
        return queue
    steps, swapped = choose.with_step(search, technique, step)
    if steps is None and not choose.comes_later(search, technique, queue):
        steps = choose.in_company(search, technique, step)
    if steps is None:
        return choose.postpone(search, step, technique, queue)
    reason = choose.cannot_pay(search, technique) or search.no_time(technique, *steps)
    if reason:
        search.refuse(step, reason)
        return queue
    kept = attempt(search, step, steps, swapped)
    if kept and "compiled" in technique.gives:
        return choose.second_chances(search, queue)
    return queue
