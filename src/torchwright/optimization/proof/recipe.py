# pyright: basic
"""The recipe as plain data: what was found, measured and noted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from torchwright.core.records import (
    Budget,
    CaseTime,
    DeviceFacts,
    Fingerprint,
    Measurement,
    Rate,
    Recipe,
    RooflinePoint,
)
from torchwright.hardware.measure.roofline import Work, point
from torchwright.optimization.engines.apply import reshaped
from torchwright.optimization.engines.dispatch.guards import check_seconds, in_words
from torchwright.optimization.engines.dispatch.spec import CallSpec
from torchwright.optimization.search.components import HIDDEN
from torchwright.optimization.search.state import Outcome
from torchwright.optimization.techniques.base import from_step
from torchwright.workloads.base import Workload


def make_recipe(
    outcome: Outcome, workload: Workload, budget: Budget, fingerprint: Fingerprint, command: str
) -> Recipe:
    """The whole result as plain data."""
    asked = reshaped(workload, outcome.best.steps).describe()
    return Recipe(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        workload=asked,
        steps=outcome.best.steps,
        budget=budget,
        baseline=outcome.baseline,
        final=outcome.final,
        speedup=outcome.speedup,
        rungs=outcome.rungs,
        fingerprint=fingerprint,
        search_seconds=outcome.seconds,
        roofline=_roofline(outcome, fingerprint.device),
        notes=(*workload.notices(), *outcome.notes, *calibration_notes(outcome, workload)),
        engine=outcome.best.prepared.engine,
        rates=_rates(outcome, workload, asked),
        more_seconds=outcome.more_seconds,
        original=outcome.description.original,
        features=outcome.description.features,
        command=command,
    )


def _rates(outcome: Outcome, workload: Workload, asked: dict[str, Any]) -> tuple[Rate, ...]:
    """Return the rates of the workload; `asked` describes the workload as the recipe's steps change it."""
    before, after = (
        workload.rates(described, {case.name: case.seconds for case in measured.cases})
        for described, measured in ((workload.describe(), outcome.baseline), (asked, outcome.final))
    )
    return tuple(Rate(name=name, before=before[name], after=after[name]) for name in before)


def calibration_notes(outcome: Outcome, workload: Workload) -> list[str]:
    """Return the notes of the report for calibration data that is also judged."""
    if workload.calibrates_apart():
        return []
    return [
        f"{step.name} was calibrated on the inputs it is judged by: with several example inputs it would not be"
        for step in outcome.best.steps
        if from_step(step).calibrates
    ]


def domain_notes(
    manifest: Mapping[str, Any],
    measured: Sequence[CaseTime],
    check_seconds: Callable[[CallSpec], float] = check_seconds,
) -> list[str]:
    """Report the calls that the guards of the kept engine leave to PyTorch's own operators, and what guards cost.

    `measured` are the workload's calls on that engine; `check_seconds` measures the guards of one.
    """
    calls = manifest.get("calls", ())
    said = in_words([guard for call in calls for guard in call.guards])
    if not said:
        return []
    engine, seconds = manifest["engine"], {case.name: case.seconds for case in measured}
    share = max(
        (
            check_seconds(call) / seconds[call.name]
            for call in calls
            if call.name in seconds and not call.sizes
        ),
        default=0.0,
    )
    cost = f"; checking for them takes {share:.1%} of a call" if share > HIDDEN else ""
    return [f"PyTorch's own operators answer calls with {'; '.join(said)}: {engine} is not right there{cost}"]


def _roofline(outcome: Outcome, device: DeviceFacts) -> tuple[RooflinePoint, ...]:
    points = []
    stages: tuple[tuple[Literal["original", "final"], Measurement], ...] = (
        ("original", outcome.baseline),
        ("final", outcome.final),
    )
    for stage, measurement in stages:
        dtype = "float32" if stage == "original" else _arithmetic(outcome)
        for case in measurement.cases:
            counts = outcome.description.counts.get(case.name)
            if counts:
                work = Work(
                    bytes=counts.bytes + measurement.weight_bytes,  # weights are read once a call
                    operations={dtype: counts.operations},
                )
                points.append(point(case.name, case.seconds, work, device, stage))
    return tuple(found for found in points if found is not None)


def _arithmetic(outcome: Outcome) -> str:
    """The type that most of the final model's multiplications are in."""
    quantized = any("int8" in coverage.kernel for coverage in outcome.best.prepared.coverage)
    return "int8" if quantized else outcome.best.prepared.dtype
