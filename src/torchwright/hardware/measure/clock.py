"""Paired timing: candidates run in turn and are compared by the median of the paired ratios; who else ran meanwhile."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from torchwright.core.cpu_load import stolen_seconds
from torchwright.core.intervals import CONFIDENCE, mean_bounds
from torchwright.core.records import Interval

FEWEST_ORDERED = 6
"""With fewer values not even the extremes bound the median with 95%."""
DISTURBED_SHARE = 0.3
"""A turn in which a thread waited for a core for more than this share of the time counts as disturbed.

On two cores with one other process the share is half and more. A process alone waits for its own threads for up to
0.26."""

Row = TypeVar("Row")


def median_interval(values: Sequence[float]) -> Interval:
    """The median with a distribution-free 95% interval, interpolated between order statistics.

    [x_(k), x_(n+1-k)] covers the true median with probability 1 - 2 P(Bin(n, 1/2) < k), whatever the distribution;
    between the two k around 95% it is interpolated (Hettmansperger and Sheather 1986). From nine values on no single
    one, however far off, moves an end beyond the others. Below six no such interval reaches 95%: there it is Student's
    of the mean, which holds the median, too.

    Raises `ValueError` for fewer than two values.
    """
    ordered = sorted(values)
    n = len(ordered)
    middle = statistics.median(ordered) if n else math.nan
    if n < FEWEST_ORDERED:
        low, high = mean_bounds(ordered)
        return Interval(value=middle, low=low, high=high)
    k, outer = 0, 1.0
    while (inner := outer - 2 * math.comb(n, k) / 2**n) >= CONFIDENCE:
        k, outer = k + 1, inner
    between = (outer - CONFIDENCE) / (outer - inner)
    inward = (n - k) * between / (k + (n - 2 * k) * between)
    return Interval(
        value=middle,
        low=ordered[k - 1] + inward * (ordered[k] - ordered[k - 1]),
        high=ordered[n - k] - inward * (ordered[n - k] - ordered[n - k - 1]),
    )


def paired_speedup(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Return the speed-up of `after` over `before`; the two were timed in turn, so each pair saw one machine.

    Raises `ValueError` when the two differ in length, or for fewer than two pairs.
    """
    found = median_interval([math.log(a / b) for a, b in zip(before, after, strict=True)])
    return Interval(value=math.exp(found.value), low=math.exp(found.low), high=math.exp(found.high))


@dataclass(kw_only=True)
class Rounds(Generic[Row]):
    """Rounds of paired timing. Those in which others ran are left out, once there are `enough` without them."""

    enough: int
    all: list[Row] = field(default_factory=list[Row])
    quiet: list[Row] = field(default_factory=list[Row])

    def add(self, row: Row, waited: float) -> None:
        """A round, and the largest share of a turn in it that was spent waiting for a core."""
        self.all.append(row)
        if waited <= DISTURBED_SHARE:
            self.quiet.append(row)

    @property
    def busy(self) -> bool:
        """True if no quiet moments were found."""
        return len(self.quiet) < min(self.enough, len(self.all))

    @property
    def counted(self) -> list[Row]:
        """The rounds that are compared."""
        return self.all if self.busy else self.quiet


@dataclass(frozen=True)
class Waiting:
    """For how long the threads of this process had been ready to run, and had no core, at one moment.

    From the scheduler's own account (/proc/self/task/*/schedstat, the second number), and what a hypervisor gave to
    others (`steal` of /proc/stat). On systems that have neither, nobody ever waits.
    """

    seconds: dict[str, float]

    @classmethod
    def now(cls) -> Waiting:
        seconds: dict[str, float] = {}
        for thread in Path("/proc/self/task").glob("*"):
            try:
                seconds[thread.name] = (
                    int((thread / "schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
                )
            except (OSError, IndexError):  # it has ended, or the kernel keeps no account
                continue
        return cls(seconds | stolen_seconds())

    def since(self, earlier: Waiting) -> float:
        """Seconds that the thread which waited longest has waited since then."""
        return max(
            (value - earlier.seconds.get(name, 0.0) for name, value in self.seconds.items()), default=0.0
        )
