# pyright: basic
"""Turning what the search found into an artifact."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from torchwright.facts import Budget, DeviceFacts, Fingerprint, Measurement, Recipe, RooflinePoint
from torchwright.measure.roofline import roofline_point
from torchwright.plan import artifact
from torchwright.plan.apply import reshaped
from torchwright.plan.program import GRAPHS, TENSORS
from torchwright.plan.search import Outcome
from torchwright.plan.trial import TrialFailed
from torchwright.workloads.base import Workload


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


def write_contents(folder: Path, outcome: Outcome, workload: Workload) -> dict[str, Any]:
    """Everything of an artifact but recipe, report and manifest; returns the manifest's own fields."""
    best = outcome.best
    native = folder / artifact.NATIVE
    portable = False
    if best.folder is not None:
        native.mkdir()
        for package in sorted(best.folder.glob("*.pt2")):
            shutil.copy2(package, native / package.name)
        for name in (GRAPHS, TENSORS):
            shutil.copy2(best.folder / name, folder / name)
        portable = True
    elif best.engine == "native":
        portable = bool(best.process.ask("save_native", folder=str(folder)))
    elif "language" not in outcome.description["properties"]:
        portable = _ask(outcome, "export", folder=str(folder))
    if best.engine == "jit":
        native.mkdir()
        if not _ask(outcome, "save_cache", path=str(native / "cache.bin")):
            native.rmdir()
    _ask(outcome, "self_test", path=str(folder / "selftest"))
    files = workload.files(weights=not portable)
    if files:
        for name, file in files.items():
            (folder / artifact.MODEL / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, folder / artifact.MODEL / name)
    signatures = best.process.ask("signatures")
    return {
        "engine": best.engine,
        "dtype": best.dtype,
        "threads": best.threads,
        "cases": tuple(signatures),
        "signatures": signatures,
        "self_contained": portable or bool(files),
    }


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
                points.append(roofline_point(case, counts, measurement.weight_bytes, dtype, device, stage))
    return tuple(point for point in points if point is not None)


def _arithmetic(outcome: Outcome) -> str:
    """The type that most of the final model's multiplications are in."""
    quantized = any("int8" in coverage.kernel for coverage in outcome.best.coverage)
    return "int8" if quantized else outcome.best.dtype
