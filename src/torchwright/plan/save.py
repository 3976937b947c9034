# pyright: basic
"""Turning what the search found into an artifact."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from torchwright.engines.program import GRAPHS, TENSORS
from torchwright.facts import Budget, DeviceFacts, Fingerprint, Measurement, Recipe, RooflinePoint
from torchwright.measure.roofline import Work, point
from torchwright.plan import artifact
from torchwright.plan.apply import reshaped
from torchwright.plan.state import Outcome
from torchwright.plan.trial import TrialFailed
from torchwright.workloads.base import Workload

NOT_KEPT = "nothing of what torch compiled can be kept here: who loads this compiles again at the first call"


def make_recipe(
    outcome: Outcome, workload: Workload, budget: Budget, fingerprint: Fingerprint, command: str
) -> Recipe:
    """The whole result as plain data."""
    return Recipe(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        workload=reshaped(workload, outcome.best.steps).describe(),
        steps=outcome.best.steps,
        budget=budget,
        baseline=outcome.baseline,
        final=outcome.final,
        speedup=outcome.speedup,
        rungs=outcome.rungs,
        fingerprint=fingerprint,
        search_seconds=outcome.seconds,
        roofline=_roofline(outcome, fingerprint.device),
        notes=outcome.notes,
        engine=outcome.best.engine,
        command=command,
    )


def write_contents(folder: Path, scratch: Path, outcome: Outcome, workload: Workload) -> dict[str, Any]:
    """Everything of an artifact but recipe, report and manifest; returns the manifest's own fields.

    `scratch` is a place for what is compiled for it.
    """
    best = outcome.best
    native = folder / artifact.NATIVE
    native.mkdir()
    signatures = best.process.ask("signatures")
    _ask(outcome, "self_test", path=str(folder / "selftest"))
    portable, engine = False, best.engine
    if best.folder is not None:
        _copy_packages(best.folder, folder)
        portable = True
    elif best.engine == "native":
        portable = bool(best.process.ask("save_native", folder=str(folder)))
    elif best.engine == "jit":
        # torch.compile's own cache for whoever replays the recipe on a module of his own; graphs and packages, where it
        # exports after all, for whoever has none. Packages come last, because this may take longer than there is time.
        cached = _ask(outcome, "save_cache", folder=str(native))
        if _ask(outcome, "package", folder=str(scratch)):
            _copy_packages(scratch, folder)
            portable, engine = True, "aot"
        elif "language" not in outcome.description["properties"] and _ask(
            outcome, "export", folder=str(folder)
        ):
            portable = True
        elif not cached:
            outcome.notes += (NOT_KEPT,)
    elif "language" not in outcome.description["properties"]:
        portable = _ask(outcome, "export", folder=str(folder))
    if not any(native.iterdir()):
        native.rmdir()
    files = workload.files(weights=not portable)
    if files:
        for name, file in files.items():
            (folder / artifact.MODEL / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, folder / artifact.MODEL / name)
    return {
        "engine": engine,
        "dtype": best.dtype,
        "threads": best.threads,
        "cases": tuple(signatures),
        "signatures": signatures,
        "self_contained": portable or bool(files),
    }


def _copy_packages(source: Path, folder: Path) -> None:
    """Packages of compiled code, and the portable graphs that they were made from."""
    for package in sorted(source.glob("*.pt2")):
        shutil.copy2(package, folder / artifact.NATIVE / package.name)
    for name in (GRAPHS, TENSORS):
        shutil.copy2(source / name, folder / name)


def _ask(outcome: Outcome, method: str, **arguments: Any) -> bool:
    try:
        return bool(outcome.best.process.ask(method, **arguments))
    except TrialFailed:
        return False


def _roofline(outcome: Outcome, device: DeviceFacts) -> tuple[RooflinePoint, ...]:
    points = []
    stages: tuple[tuple[Literal["original", "final"], Measurement], ...] = (
        ("original", outcome.baseline),
        ("final", outcome.final),
    )
    for stage, measurement in stages:
        dtype = "float32" if stage == "original" else _arithmetic(outcome)
        for case in measurement.cases:
            counts = outcome.description["operations"].get(case.name)
            if counts:
                work = Work(
                    bytes=counts["bytes"] + measurement.weight_bytes,  # weights are read once a call
                    operations={dtype: counts["operations"]},
                )
                points.append(point(case.name, case.seconds, work, device, stage))
    return tuple(found for found in points if found is not None)


def _arithmetic(outcome: Outcome) -> str:
    """The type that most of the final model's multiplications are in."""
    quantized = any("int8" in coverage.kernel for coverage in outcome.best.coverage)
    return "int8" if quantized else outcome.best.dtype
