"""Figures over the steps of a run as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from markupsafe import Markup

from torchwright.report import drawing as d

Points = Sequence[tuple[int, float]]
WIDTH, HEIGHT = 520, 240
MOST = 400
"""Points of a line; of more, the means of as many equal parts are drawn."""
COLOURS = (d.KEPT, d.WARM)


def curve(key: str, title: str, lines: Mapping[str, Points], words: Callable[[float], str]) -> Markup | None:
    """At most two lines over the same steps, the second as dots; None where none has a finite value.

    `key` is unique in the page, `words` says a value at the axis.
    """
    finite = {
        name: [(step, value) for step, value in points if math.isfinite(value)]
        for name, points in lines.items()
    }
    drawn = {name: thinned(points) for name, points in finite.items() if points}
    if not drawn:
        return None
    steps = [step for points in drawn.values() for step, _ in points]
    values = [value for points in drawn.values() for _, value in points]
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    with d.drawing(WIDTH, HEIGHT, left=64, right=16, top=24, bottom=40) as plate:
        plate.axis(
            "x", min(steps), max(max(steps), min(steps) + 1), lambda step: f"{step:,.0f}", "step", ticks=6
        )
        plate.axis("y", low - margin, high + margin, words, title, ticks=6)
        for number, (name, points) in enumerate(drawn.items()):
            colour = COLOURS[number % 2]
            if number == 0 and len(points) > 1:
                plate.line([step for step, _ in points], [value for _, value in points], colour, width=1.6)
            else:
                for step, value in points:
                    plate.mark(step, value, "o", colour, extent=5)
            if len(drawn) > 1:
                plate.label(*points[-1], name, colour, right=0, up=8 + 12 * number, align="right")
        about = "; ".join(
            f"{name}: {words(points[-1][1])} at step {points[-1][0]:,}" for name, points in drawn.items()
        )
        return plate.svg(key, title, about)


def thinned(points: Points) -> list[tuple[int, float]]:
    """The points, or where there are more than `MOST` the means of that many parts, each at its last step."""
    if len(points) <= MOST:
        return list(points)
    bounds = [len(points) * part // MOST for part in range(MOST + 1)]
    parts = [points[begin:end] for begin, end in pairwise(bounds)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]
