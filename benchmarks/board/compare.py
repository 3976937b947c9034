"""Compare a figure between commits. A change counts if it is above 10% and the two 95% intervals do not overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.board.rows import Figure, Row

LEAST = 0.10
"""Smaller changes are not reported: kept originals, timed against themselves, are off by as much (statistics page)."""


@dataclass(frozen=True)
class Key:
    """The figures that compare: one measure of one workload under the same conditions on the same machine."""

    device: str
    benchmark: str
    workload: str
    conditions: str
    technique: str
    measure: str

    def __str__(self) -> str:
        conditions = f" ({self.conditions})" if self.conditions else ""
        return f"{self.workload}{conditions}, {self.technique} {self.measure}, on {self.device}"


@dataclass(frozen=True)
class Point:
    """A figure with an interval, and the row that it stands in."""

    row: Row
    figure: Figure
    value: float
    low: float
    high: float

    @property
    def label(self) -> str:
        return self.row.commit or "not recorded"

    @property
    def counts(self) -> bool:
        """Check whether the figure belongs to a commit, whose tree can be checked out again."""
        return self.row.clean


@dataclass(frozen=True, kw_only=True)
class Change:
    """The newest figure of a series against the best that an earlier commit proved."""

    key: Key
    before: Point
    after: Point

    @property
    def ratio(self) -> float:
        return self.after.value / self.before.value

    @property
    def verdict(self) -> str:
        """`regression`, `improvement`, `within 10%`, or `undecided` if the intervals overlap."""
        if self.after.low <= self.before.high and self.before.low <= self.after.high:
            return "undecided"
        if abs(self.ratio - 1) <= LEAST:
            return "within 10%"
        return "regression" if self.ratio < 1 else "improvement"


def series(rows: Iterable[Row]) -> dict[Key, list[Point]]:
    """Return the figures with an interval, in the rows' order; of one commit only the newest is kept."""
    found: dict[Key, dict[str, Point]] = {}
    for row in rows:
        for figure in row.figures:
            if figure.value is None or figure.low is None or figure.high is None:
                continue
            key = Key(
                row.device, row.benchmark, row.workload, row.conditions, figure.technique, figure.measure
            )
            points = found.setdefault(key, {})
            commit = row.commit or row.source  # figures without a commit do not replace each other
            points.pop(commit, None)
            points[commit] = Point(row, figure, figure.value, figure.low, figure.high)
    return {key: list(points.values()) for key, points in found.items()}


def change(key: Key, points: Sequence[Point]) -> Change | None:
    """Return the newest figure against the earlier one with the highest low end; None with fewer than two commits.

    The step before is not enough: a regression that is measured again would disappear from the list.
    """
    counted = [point for point in points if point.counts]
    if len(counted) < 2:
        return None
    *earlier, after = counted
    return Change(key=key, before=max(earlier, key=lambda point: point.low), after=after)


def changes(rows: Iterable[Row]) -> list[Change]:
    """Return a comparison for each series of two commits or more."""
    found = (change(key, points) for key, points in series(rows).items())
    return [each for each in found if each is not None]


def regressions(rows: Iterable[Row]) -> list[Change]:
    """Return the regressions, the largest drop first."""
    found = [each for each in changes(rows) if each.verdict == "regression"]
    return sorted(found, key=lambda each: each.ratio)
