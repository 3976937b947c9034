"""Counts over the rows: how verdicts are spread, and whether the intervals keep what they promise."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.board.compare import Change, changes
from benchmarks.board.rows import ORIGINAL, WHOLE, Figure, Row
from torchwright.core.intervals import share_bounds

KEPT_ORIGINAL = "the original"
"""A zoo row's `kept` when no step paid: the artifact is the original module."""


@dataclass(frozen=True)
class Share:
    """A count out of a number, with the 95% interval of its share."""

    count: int
    of: int

    @property
    def share(self) -> float:
        return self.count / self.of

    @property
    def bounds(self) -> tuple[float, float]:
        return share_bounds(self.count, self.of)


@dataclass(frozen=True, kw_only=True)
class Statistics:
    rows: int
    clean: int
    """Rows whose tree was a recorded commit without changes."""
    figures: int
    intervals: int
    verdicts: dict[str, int]
    """Verdicts of the figures of whole recipes."""
    half_widths: list[float]
    """Half widths of the intervals over their value: the smallest, the quartiles and the largest."""
    itself: Share | None
    """Intervals that cover 1 where the original was timed against itself."""
    far: int
    """Those of them that miss 1 and are off by more than 10%."""
    claims: Share | None
    """Claims of searches whose interval overlaps that of the re-timing in a new process."""
    kept_claims: Share | None
    """Re-timings that do not stay below the claim's low end."""
    changes: dict[str, int]
    """Verdicts between commits."""


def of(rows: Sequence[Row]) -> Statistics:
    figures = [figure for row in rows for figure in row.figures]
    with_interval = [figure for figure in figures if figure.has_interval]
    widths = sorted(map(_half_width, with_interval))
    ourselves = [figure for row in rows if _kept_original(row) if (figure := row.figure(WHOLE, ORIGINAL))]
    claimed = [(row.claim, figure) for row in rows if row.claim and (figure := row.figure(WHOLE, ORIGINAL))]
    return Statistics(
        rows=len(rows),
        clean=sum(row.clean for row in rows),
        figures=len(figures),
        intervals=len(with_interval),
        verdicts=dict(Counter(figure.verdict for figure in figures if figure.technique == WHOLE)),
        half_widths=[widths[0], *statistics.quantiles(widths, n=4), widths[-1]] if len(widths) > 1 else [],
        itself=_share(ourselves, lambda figure: figure.verdict == "undecided"),
        far=sum(figure.verdict != "undecided" and abs((figure.value or 1) - 1) > 0.1 for figure in ourselves),
        claims=_share(claimed, lambda pair: _overlap(pair[0], pair[1])),
        kept_claims=_share(claimed, lambda pair: (pair[1].high or 0) >= pair[0][1]),
        changes=dict(Counter(each.verdict for each in changes(rows))),
    )


def machines(rows: Sequence[Row]) -> list[tuple[str, int, int, list[Change]]]:
    """Return for each device its rows, its workloads and its comparisons between commits."""
    found = list[tuple[str, int, int, list[Change]]]()
    for device in dict.fromkeys(row.device for row in rows):
        here = [row for row in rows if row.device == device]
        found.append((device, len(here), len({row.workload for row in here}), changes(here)))
    return found


def _kept_original(row: Row) -> bool:
    return row.facts.get("kept") == KEPT_ORIGINAL


def _half_width(figure: Figure) -> float:
    assert figure.value is not None
    assert figure.low is not None
    assert figure.high is not None
    return (figure.high - figure.low) / 2 / figure.value


def _overlap(claim: tuple[float, float, float], figure: Figure) -> bool:
    return claim[1] <= (figure.high or 0) and (figure.low or 0) <= claim[2]


def _share(of: Sequence[Any], holds: Callable[[Any], bool]) -> Share | None:
    return Share(sum(map(holds, of)), len(of)) if of else None
