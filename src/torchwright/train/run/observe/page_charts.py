"""The charts of a run's page (no torch)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

from torchwright.report.curves import Chart, Points, chart
from torchwright.train.run.observe.history import COUNTED, History
from torchwright.train.run.observe.metrics import HELD_OUT, UNITS

QUALITY = (
    "accuracy",
    "accepted_tokens",
    "recall_at_1",
    "word_error_rate",
    "reward_accuracy",
    "auc",
    "normalized_entropy",
)
"""Figures that a run is judged by in addition to its loss, if its kind has them."""

MOST_MARKS = 1000
"""Epochs between two steps with figures; more are not marked, as in a file that holds another number by damage."""


def charts(history: History) -> Iterator[Chart]:
    """Yield a chart for each figure that the run has: losses with validation and epochs first."""
    epochs = epoch_marks(history)
    validation = history.series(f"{HELD_OUT}loss")
    found = [
        chart(
            "Loss",
            _with_validation(history, "loss"),
            lambda value: f"{value:.3g}",
            smooth=True,
            marks=epochs,
            best=_least(validation) if len(validation) > 1 else None,
        )
    ]
    for name in QUALITY:
        lines = _with_validation(history, name)
        found.append(chart(title(name), lines, formatted(UNITS[name]), smooth=True, marks=epochs))
    found += [
        chart("Learning rate", {"lr": history.series("lr")}, lambda value: f"{value:.1e}"),
        chart(
            "Gradient norm",
            {"norm": history.series("grad_norm")},
            lambda value: f"{value:.3g}",
            smooth=True,
        ),
        chart("Fullest expert over the mean", _loads(history), lambda value: f"{value:.3g}"),
    ]
    for unit in COUNTED:
        speed = {unit: history.series(f"{unit}_per_s")}
        found.append(
            chart(f"{unit.capitalize()} per second", speed, lambda value: f"{value:,.4g}", smooth=True)
        )
    yield from (each for each in found if each is not None)


def title(name: str) -> str:
    """Return a figure's name as a heading."""
    return name.replace("_", " ").capitalize()


def formatted(unit: str) -> Callable[[float], str]:
    """Return the function that formats values by a format specification."""
    return lambda value: format(value, unit)


def epoch_marks(history: History) -> list[tuple[int, float]]:
    """Return (step, number) of each epoch's end, interpolated between steps with figures."""
    marks = list[tuple[int, float]]()
    for (before, low), (after, high) in pairwise([(0, 0.0), *history.series("epoch")]):
        if not (math.isfinite(low) and math.isfinite(high)) or not 0 < high - low <= MOST_MARKS:
            continue
        for number in range(math.floor(low) + 1, math.floor(high) + 1):
            marks.append((round(before + (after - before) * (number - low) / (high - low)), float(number)))
    return marks


def _with_validation(history: History, name: str) -> dict[str, Points]:
    return {"training": history.series(name), "validation": history.series(HELD_OUT + name)}


def _least(points: Points) -> tuple[int, float] | None:
    finite = [point for point in points if math.isfinite(point[1])]
    return min(finite, key=lambda point: point[1], default=None)


def _loads(history: History) -> dict[str, Points]:
    """Return how full experts were: in the layer where they were least even, and as the mean of layers."""
    of_layers = {
        step: [load for name, load in figures.items() if name.startswith("expert_load/")]
        for step, figures in sorted(history.figures.items())
    }
    means = [(step, sum(loads) / len(loads)) for step, loads in of_layers.items() if loads]
    return {"worst layer": history.series("expert_load"), "mean of layers": means}
