"""Steps that change how an artifact is served, tried on the artifact itself once the search is over."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from torchwright.core.errors import TorchwrightError
from torchwright.core.records import Interval, Step, StepResult
from torchwright.optimization.search.state import Search
from torchwright.optimization.techniques.base import ServedGain, Technique, from_step
from torchwright.workloads.base import Workload


def try_served(
    search: Search, workload: Workload, artifact: Path, properties: frozenset[str]
) -> tuple[Step, ...]:
    """Try `search.served` on an artifact whose model has these properties, with a row for each; return the kept ones.

    Their files are added to the artifact, in a folder of the step's name.
    """
    kept: list[Step] = []
    for step in search.served:
        search.tell("trying", f"{step}, on the artifact")
        technique = from_step(step)
        if reason := _refusal(search, technique, properties, kept):
            search.refuse(step, reason)
            continue
        try:
            files = technique.files()
            found = technique.try_on(artifact, workload.describe(), search.context.allowed(essential=True))
            row = _judged(search, technique, found)
            if row.kept:
                for name, file in files.items():
                    place = artifact / step.name / name
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(file, place)
                kept.append(step)
        except TorchwrightError as failure:
            row = StepResult(step=step, kept=False, status="failed", reason=failure.reason)
        search.add(row)
    return tuple(kept)


def _refusal(
    search: Search, technique: Technique, properties: frozenset[str], kept: list[Step]
) -> str | None:
    if search.budget.objective == "memory":
        return "it takes memory, of which the recipe shall use little"
    if lacking := technique.required - properties:
        return f"the recipe that was found has no: {', '.join(sorted(lacking))}"
    others = [str(other) for other in kept if technique.replaces(from_step(other))]
    return f"{others[0]} is kept, and a recipe has one of them" if others else None


def _judged(search: Search, technique: Technique, found: ServedGain) -> StepResult:
    """Return the row of a step: kept if one condition gains beyond the noise, and none is slower."""
    busy = search.context.sampled_load().crowded
    gains = {where: gain.on_busy_machine() if busy else gain for where, gain in found.gains.items()}
    best = max(gains.values(), key=lambda gain: gain.low)
    slower = any(gain.high < 1.0 for gain in gains.values())
    pays = best.low > 1.0 and best.value >= technique.least_gain and not best.disturbed and not slower
    status: Literal["kept", "inconclusive", "dropped"] = (
        "kept" if pays else "inconclusive" if _is_noise(best) and not slower else "dropped"
    )
    measured = ", ".join(f"{gain} {where}" for where, gain in gains.items())
    return StepResult(
        step=technique.step(),
        kept=pays,
        status=status,
        reason=f"served, over {found.over}: {measured}; {found.note}",
        speedup=best,
    )


def _is_noise(gain: Interval) -> bool:
    return gain.disturbed and gain.high > 1.0
