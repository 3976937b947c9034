"""A series over commits as a drawing: a dot for each figure, a line for its interval, and the baseline at 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.board.compare import Change, Key, Point, change

WIDTH, HEIGHT = 320, 150
LEFT, RIGHT, TOP, BOTTOM = 34, 20, 18, 26
"""Room for the value at the baseline, for half a label at the end, above and below."""
MOST = 8
"""Figures of a drawing; labels of more commits overlap. The newest are kept."""


@dataclass(frozen=True, kw_only=True)
class Dot:
    x: float
    y: float
    top: float
    bottom: float
    point: Point
    falls: bool
    """True for the newest figure of a regression."""


@dataclass(frozen=True, kw_only=True)
class Trend:
    key: Key
    dots: list[Dot]
    baseline: float
    """Height of 1.0x."""
    change: Change | None

    @property
    def regression(self) -> bool:
        return self.change is not None and self.change.verdict == "regression"


def trend(key: Key, points: Sequence[Point]) -> Trend:
    """Lay out a series, for an SVG of WIDTH by HEIGHT."""
    found = change(key, points)
    shown = points[-MOST:]
    low = min(1.0, *(point.low for point in shown))
    high = max(1.0, *(point.high for point in shown))
    span = (high - low) or 1.0

    def y(value: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / span, 1)

    step = (WIDTH - LEFT - RIGHT) / max(len(shown) - 1, 1)
    falls = found.after if found is not None and found.verdict == "regression" else None
    dots = [
        Dot(
            x=round(LEFT + step * place, 1),
            y=y(point.value),
            top=y(point.high),
            bottom=y(point.low),
            point=point,
            falls=point is falls,
        )
        for place, point in enumerate(shown)
    ]
    return Trend(key=key, dots=dots, baseline=y(1.0), change=found)
