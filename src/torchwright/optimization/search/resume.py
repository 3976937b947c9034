"""Continuing a search: what an earlier one has measured, and whether it holds here.

Its artifact is untrusted: every step must be a registered technique's, with options that it takes. Rows are
taken over as they are; the recipe is prepared and measured again, and ships only if the last comparison says so.
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchwright.core.errors import ArtifactError, TorchwrightError
from torchwright.core.records import Budget, Fingerprint, Recipe, Step, StepResult
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.artifact.fingerprint import fingerprint_here
from torchwright.optimization.engines.apply import reshaped
from torchwright.optimization.search import choose, estimate
from torchwright.optimization.search.compare import compare, worth
from torchwright.optimization.search.judging import measure
from torchwright.optimization.search.state import PATIENCE, Request, Rival, Search
from torchwright.optimization.techniques.base import from_step
from torchwright.optimization.trial import client as trial
from torchwright.optimization.trial.client import TrialFailed
from torchwright.report import wording

MOST_ROWS = 1000
"""Limit on the rows of an earlier search: ten times what this search could write."""
ANEW = "start anew: the same without resuming"


def read(path: Path, request: Request, device: str) -> Recipe:
    """The result of the search to continue, without its rows for techniques that are not to be tried this time.

    Raises `ArtifactError` for a missing artifact, or one of another search: of other calls, another budget, other
    versions or another machine.
    """
    artifact.put_back(path)
    if not path.exists():
        raise ArtifactError(
            f"there is no search to continue in {path}",
            found="nothing: a search that was stopped before its end leaves nothing behind",
            next=ANEW,
        )
    found, _ = artifact.open_artifact(path)
    recipe = _as_searched(_checked(path, found))
    here = fingerprint_here(device, measured=False)
    workload = json.loads(json.dumps(reshaped(request.workload, recipe.steps).describe()))
    then = _conditions(recipe.workload, recipe.budget, recipe.fingerprint)
    now = _conditions(workload, request.budget, here)
    differ = [
        f"{name}: {then.get(name, 'none')!s:.200} then, {now.get(name, 'none')!s:.200} now"
        for name in {**then, **now}
        if then.get(name) != now.get(name)
    ]
    if differ:
        raise _refusal(path, "what it measured would not hold here", "; ".join(differ))
    barred = [step for step in recipe.steps if not request.may_try(step)]
    if barred:
        raise _refusal(path, "its recipe has what is not to be tried", ", ".join(map(str, barred)))
    return replace(recipe, rungs=tuple(rung for rung in recipe.rungs if request.may_try(rung.step)))


def restore(search: Search) -> list[Step]:
    """Take over the rows and the recipe of the earlier search, if there is one; returns the steps that it has left.

    Raises `ArtifactError` where the original is another model, `TorchwrightError` where the recipe hangs.
    """
    earlier = search.earlier
    if earlier is None:
        return []
    structure = search.description.original.structure
    if earlier.original is None or earlier.original.structure != structure:
        raise ArtifactError(
            "the earlier search cannot be continued: its original has other layers or weights of other shapes",
            next=ANEW,
        )
    why = _measure_again(search, earlier.steps) if earlier.steps else None
    if why is not None:
        _say(search, f"the recipe of the earlier search did not hold ({why}): all of it was searched anew")
        return []
    if any(choose.is_closed(from_step(step)) for step in search.best.steps):
        search.rival = Rival(candidate=search.best, proven=search.proven)
        search.best = search.baseline
    rows = [rung for rung in earlier.rungs if _has_verdict(rung, earlier)]
    left = [rung.step for rung in earlier.rungs if rung not in rows]
    message = f"continues the search that ended at {earlier.created}: rows of an earlier search were measured by then"
    if not _judged_alike(search, earlier):
        rows = [rung for rung in rows if not _lost_too_much(rung)]
        message += "; since then the original's weights or metric have changed, and what lost too much is tried again"
    search.rungs = [replace(rung, earlier=True) for rung in rows]
    _say(search, message)
    return left


def _has_verdict(rung: StepResult, earlier: Recipe) -> bool:
    """Check whether a row was measured or refused; the steps of a recipe that failed its proof are open again."""
    measured = not rung.undecided and rung.status != "skipped"
    return measured and not (rung.status == "removed" and not earlier.steps)


def _lost_too_much(rung: StepResult) -> bool:
    """Check whether the metric alone decided: a step that lost too much was not timed."""
    return rung.quality is not None and rung.speedup is None


def _judged_alike(search: Search, earlier: Recipe) -> bool:
    """Check whether the original has the same weights and metric value as in the earlier search."""
    then, now = earlier.baseline.quality, search.baseline.quality
    assert now is not None
    value = then is not None and math.isclose(then.reference, now.reference, rel_tol=1e-6)
    return value and earlier.original == search.description.original


def _say(search: Search, text: str) -> None:
    search.notes.append(text)
    search.tell("notice", text)


def _measure_again(search: Search, steps: tuple[Step, ...]) -> str | None:
    """Make the earlier recipe the best; or say why it is not within the budget, or no faster than the original."""
    search.tell("trying", f"the recipe of the earlier search: {', '.join(map(str, steps))}")
    begun = search.context.clock()
    try:
        with ExitStack() as stack:
            candidate = trial.start_candidate(search.context, steps, essential=True)
            stack.callback(candidate.close)
            search.spend(candidate, search.context.clock() - begun)
            measure(search, candidate)
            if search.over_budget(candidate):
                assert candidate.quality is not None
                return f"its loss is up to {candidate.quality.drop_high:.2%}"
            _give_time(search, steps, begun)
            comparison = compare(search, candidate)
            noisy = search.budget.objective != "memory" and comparison.total.high > 1.0
            if not noisy and (why := worth(search, steps[-1], candidate, comparison)):
                return why
            search.promote(candidate, comparison)
            stack.pop_all()
    except TrialFailed as failure:
        if failure.timed_out:
            raise TorchwrightError(
                "the recipe of the earlier search was not measured", found=failure.reason, next=ANEW
            ) from failure
        return failure.reason
    except TorchwrightError as refusal:
        return refusal.found or refusal.summary
    return None


def _give_time(search: Search, steps: tuple[Step, ...], begun: float) -> None:
    """Let the time budget start now that the earlier recipe is prepared, and compare it with the original."""
    search.stretch(search.context.clock() - begun)
    search.context.deadline = estimate.latest(search, steps)
    search.stretch(max(0.0, PATIENCE * estimate.comparison_seconds(search) - search.context.remaining()))
    search.context.deadline = estimate.latest(search, steps)


def _checked(path: Path, recipe: Recipe) -> Recipe:
    """The recipe with its steps as their techniques write them."""
    if len(recipe.rungs) > MOST_ROWS:
        raise _refusal(path, "its recipe is damaged", f"{len(recipe.rungs):,} rows")
    try:
        rungs = tuple(replace(rung, step=from_step(rung.step).step()) for rung in recipe.rungs)
        steps = tuple(from_step(step).step() for step in recipe.steps)
    except TorchwrightError as error:
        raise _refusal(path, "its recipe is damaged", str(error)) from error
    kept = [rung.step for rung in rungs if rung.kept]
    fits = len(kept) == len(steps) and all(step in kept for step in steps)
    if not fits or any(rung.kept != (rung.status == "kept") for rung in rungs):
        raise _refusal(path, "its recipe is damaged", "its rows do not fit its steps")
    return replace(recipe, rungs=rungs, steps=steps)


def _as_searched(recipe: Recipe) -> Recipe:
    """The recipe without what was tried on its artifact: another artifact is written, and it is tried there again."""
    rungs = tuple(rung for rung in recipe.rungs if not from_step(rung.step).served)
    return replace(
        recipe, rungs=rungs, steps=tuple(step for step in recipe.steps if not from_step(step).served)
    )


def _refusal(path: Path, why: str, found: str) -> ArtifactError:
    return ArtifactError(
        f"the search in {path} cannot be continued: {why}", found=wording.clean(found), next=ANEW
    )


def _conditions(workload: dict[str, Any], budget: Budget, at: Fingerprint) -> dict[str, Any]:
    """Return what a row's figures depend on, in addition to the model itself."""
    return {
        **workload,
        "max_drop": budget.max_drop,
        "objective": budget.objective,
        "torchwright": at.torchwright,
        "torch": at.torch,
        **at.libraries,
        "device": at.device.kind,
        "processor": at.device.name,
        "ISA": " ".join(sorted(at.device.isa)),
        "cores": at.device.cores,
        "threads": max(at.threads, at.most_threads or 0),
    }
