"""Charts of figures over the steps of a run, laid out for `chart.html.j2` (no torch, no plotting library).

A run's page is written again and again while the run trains, so that a chart must cost milliseconds. Its lines are SVG
that stretches to the width of the page; its words are HTML, which keeps its size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Points = Sequence[tuple[int, float]]
SIZE = 1000
"""Units of a chart's view box in both directions."""
MOST = 400
"""Points of a line; of more, the means of as many equal parts are drawn."""
SMOOTHED_FROM = 8
"""Points of which a mean over neighbours says more than the points themselves."""
SMOOTH = 0.04
"""Share of the points, on either side, that a smoothed point is a mean of."""
TICKS, MOST_MARKS = 5, 8
"""Labels of an axis and upright marks at most: more of them overlap on a phone."""


@dataclass(frozen=True)
class Tick:
    """A label of an axis or of an upright mark."""

    percent: float
    """Distance from the left or from the top."""
    text: str


@dataclass(frozen=True)
class Trace:
    """An SVG path and the class that styles it."""

    style: str
    path: str


@dataclass(frozen=True)
class Key:
    """An entry of a chart's legend."""

    style: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart, ready for its template."""

    title: str
    about: str
    """A description for readers who do not see it."""
    columns: list[Tick]
    rows: list[Tick]
    marks: list[Tick]
    """Upright lines with a label on top."""
    traces: list[Trace]
    keys: list[Key]
    ring: tuple[float, float] | None
    """Place of the best validation figure, in percent."""


def chart(
    title: str,
    lines: Mapping[str, Points],
    words: Callable[[float], str],
    *,
    smooth: bool = False,
    marks: Points = (),
    best: tuple[int, float] | None = None,
) -> Chart | None:
    """Lay out at most two lines over the same steps; return None if none has a finite value.

    `words` formats a value. `smooth` draws the first line over its points, as means over neighbours. `marks` are steps
    with a number (epochs), `best` is the point of the second line that gets a ring.
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
    x = _Scale(min(steps), max(max(steps), min(steps) + 1))
    margin = 0.06 * (max(values) - min(values)) or abs(max(values)) * 0.06 or 1.0
    y = _Scale(min(values) - margin, max(values) + margin)
    traces, keys = list[Trace](), list[Key]()
    for style, (name, points) in zip(("first", "second"), drawn.items(), strict=False):
        if style == "first" and smooth and len(points) >= SMOOTHED_FROM:
            traces += [Trace("raw", _path(points, x, y)), Trace(style, _path(smoothed(points), x, y))]
        else:
            traces.append(Trace(style, _path(points, x, y)))
            if style == "second" or len(points) == 1:
                traces.append(Trace(f"{style} dots", _dots(points, x, y)))
        keys.append(Key(style, f"{name} {words(points[-1][1])}"))
    if best is not None and "second" in {key.style for key in keys}:
        keys.append(Key("ring", f"best {words(best[1])} at step {best[0]:,}"))
    else:
        best = None
    return Chart(
        title=title,
        about="; ".join(
            f"{name}: {words(points[-1][1])} at step {points[-1][0]:,}" for name, points in drawn.items()
        ),
        columns=[
            Tick(x.percent(step), f"{step:,.0f}") for step in ticks(x.low, x.high, TICKS) if step == int(step)
        ],
        rows=[Tick(100 - y.percent(value), words(value)) for value in ticks(y.low, y.high, TICKS)],
        marks=[
            Tick(x.percent(step), f"{number:g}")
            for step, number in _thinned_marks(marks)
            if x.low <= step <= x.high
        ],
        traces=traces,
        keys=keys if len(keys) > 1 else [],
        ring=None if best is None else (x.percent(best[0]), 100 - y.percent(best[1])),
    )


@dataclass(frozen=True)
class _Scale:
    """The range of an axis."""

    low: float
    high: float

    def percent(self, value: float) -> float:
        return round(100 * (value - self.low) / (self.high - self.low), 2)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return the multiples of 1, 2 or 5 times a power of ten within a range, as many as fit but at most `most`."""
    unit = 10.0 ** math.floor(math.log10((high - low) / most))
    for every in (1, 2, 5, 10, 20, 50):
        first, last = math.ceil(low / (every * unit)), math.floor(high / (every * unit))
        if last - first < most:
            return [number * every * unit for number in range(first, last + 1)]
    raise AssertionError("fifty times a tenth of the range is wider than the range")


def thinned(points: Points) -> list[tuple[int, float]]:
    """Return the points, or where there are more than `MOST` the means of that many parts, each at its last step."""
    if len(points) <= MOST:
        return list(points)
    bounds = [len(points) * part // MOST for part in range(MOST + 1)]
    parts = [points[begin:end] for begin, end in pairwise(bounds)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def smoothed(points: Points) -> list[tuple[int, float]]:
    """Return the mean of each point and its neighbours on both sides, so that nothing is delayed."""
    reach = max(1, round(SMOOTH * len(points)))
    means = list[tuple[int, float]]()
    for place, (step, _) in enumerate(points):
        around = points[max(0, place - reach) : place + reach + 1]
        means.append((step, sum(value for _, value in around) / len(around)))
    return means


def _thinned_marks(marks: Points) -> Points:
    """Return every mark, every second one, every fifth …: `MOST_MARKS` at most."""
    for every in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000):
        kept = [(step, number) for step, number in marks if number % every == 0]
        if len(kept) <= MOST_MARKS:
            return kept
    return ()


def _path(points: Points, x: _Scale, y: _Scale) -> str:
    return "M" + "L".join(f"{across:g} {down:g}" for across, down in _places(points, x, y))


def _dots(points: Points, x: _Scale, y: _Scale) -> str:
    """Return lines without a length, whose round ends are dots however the drawing is stretched."""
    return "".join(f"M{across:g} {down:g}h0" for across, down in _places(points, x, y))


def _places(points: Points, x: _Scale, y: _Scale) -> list[tuple[float, float]]:
    return [
        (round(SIZE / 100 * x.percent(step), 1), round(SIZE / 100 * (100 - y.percent(value)), 1))
        for step, value in points
    ]
