"""What a divergence looks like on the processes, and what that says about its cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchwright.train.prove.compare import Difference, RankReport

TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
"""The largest relative error that counts as the same."""
SLACK = 100
"""How many tolerances a pattern may be off: ratios and sums of noisy values are noisier than the values."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first value that differs, in the order in which a step computes it."""

    tensor: str
    dtype: str
    error: float
    ratio: float | None
    """actual over wanted, where one factor explains the difference."""
    axis: str
    """The axis, or the axes together, without which the layout is right."""
    cause: str

    def __str__(self) -> str:
        factor = f"{self.ratio:.3f}x: " if self.ratio is not None else ""
        return f"{factor}{self.cause}"


def worst(reports: Sequence[RankReport]) -> Difference:
    """The largest difference of all values and processes."""
    differences = [difference for report in reports for difference in report.differences]
    return max(differences, key=lambda difference: difference.error)


def diagnose(
    reports: Sequence[RankReport], dtype: str, axes: Sequence[str], degrees: dict[str, int]
) -> Divergence | None:
    """The first divergence in the reports of the smallest layout that fails, None where there is none.

    `axes` are those to blame together, `degrees` their sizes.
    """
    tolerance = TOLERANCES[dtype]
    for differences in zip(*(report.differences for report in reports), strict=True):
        error = max(difference.error for difference in differences)
        if error > tolerance:
            ratio, cause = _Seen(reports, differences, tolerance, axes, degrees).explain()
            return Divergence(
                tensor=differences[0].name,
                dtype=dtype,
                error=error,
                ratio=ratio,
                axis=" with ".join(axes),
                cause=cause,
            )
    return None


@dataclass(frozen=True)
class _Seen:
    """The first divergent value, as every process has it."""

    reports: Sequence[RankReport]
    differences: Sequence[Difference]
    tolerance: float
    axes: Sequence[str]
    degrees: dict[str, int]

    @property
    def name(self) -> str:
        return self.differences[0].name

    def explain(self) -> tuple[float | None, str]:
        """The factor, where there is one, and the likely cause."""
        axis, ratio = " with ".join(self.axes), self._common_ratio()
        ways = math.prod(self.degrees[part] for part in self.axes)
        if self.name == "labels" and ratio is not None:
            what = "lost" if ratio < 1 else "counted too often"
            return ratio, f"labels {what} on {axis}: they are to be shifted before sequences are divided"
        if ratio is not None and self._near(ratio, ways):
            return ratio, f"a mean missing on {axis}"
        if ratio is not None and self._near(ratio, 1 / ways):
            return ratio, f"a mean too many, or a sum missing, on {axis}"
        if (
            ratio is not None
            and self.name.startswith("loss")
            and self._near(ratio, self.reports[0].mean_of_means)
        ):
            return (
                ratio,
                f"a mean of means on {axis}: processes with few labels weigh as much as those with many",
            )
        for part in self.axes:
            if self._adds_up(part):
                what = "a sum of squares" if self.name.startswith("norm") else "a sum"
                return None, f"{what} missing on {part}: the processes' parts add up to the right value"
        for part in self.axes:
            if not self._divided and not self._same_along(part):
                return None, f"copies differ along {part}: what its processes should share is not shared"
        if ratio is not None:
            return ratio, f"a scale that depends on {axis}"
        if self.name.startswith("backward/"):
            return None, f"a gradient incomplete on {axis}, in the backward pass of what follows this value"
        return None, f"something that {axis} computes in another way"

    @property
    def _divided(self) -> bool:
        """Whether each process holds tokens of its own of this value."""
        return self.name.startswith(("forward/", "backward/"))

    def _near(self, ratio: float, value: float) -> bool:
        return abs(ratio - value) <= SLACK * self.tolerance * abs(value)

    def _common_ratio(self) -> float | None:
        """The factor by which every process's value is wrong, where it is one."""
        ratios = [difference.ratio for difference in self.differences]
        if max(difference.residual for difference in self.differences) > SLACK * self.tolerance:
            return None
        return ratios[0] if all(self._near(ratio, ratios[0]) for ratio in ratios) else None

    def _adds_up(self, axis: str) -> bool:
        """Whether the values of the processes along `axis` sum to the wanted one."""
        whole = self.name == "backward/norm" and axis == "tp"  # all of its processes hold all tokens
        if self._divided and not whole:
            return False
        for group in self._along(axis):
            wanted = self.differences[group[0]].wanted_projection
            total = sum(self.differences[place].projection for place in group)
            if not self._near(total, wanted):
                return False
        return bool(self._along(axis))

    def _same_along(self, axis: str) -> bool:
        for group in self._along(axis):
            values = [self.differences[place].projection for place in group]
            if not all(self._near(value, values[0]) for value in values):
                return False
        return True

    def _along(self, axis: str) -> list[list[int]]:
        """Processes that differ in nothing but `axis`; none for ep, which is no dimension of its own."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, report in enumerate(self.reports):
            if axis in report.coordinate:
                others = tuple(at for name, at in report.coordinate.items() if name != axis)
                groups.setdefault(others, []).append(place)
        return list(groups.values())
