"""Diagnose a divergence from its pattern over the processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchwright.train.prove.compare import Difference, RankReport

SLACK, MOST_SLACK = 100, 0.1
"""Tolerances for a pattern: a multiple, and an upper limit. Ratios of noisy values are noisier than the values."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first value that differs, in the order in which a step computes it."""

    tensor: str
    dtype: str
    error: float
    ratio: float | None
    """actual over wanted, where one factor explains the difference."""
    axis: str
    """The axis, or what together, without which the run is right."""
    layer: str
    """The module whose computation or collective it is; empty if it belongs to no module."""
    cause: str

    def __str__(self) -> str:
        factor = f"{self.ratio:.3f}x: " if self.ratio is not None else ""
        return f"{factor}{self.cause}" + (f", in {self.layer}" if self.layer else "")


def worst(reports: Sequence[RankReport]) -> Difference:
    """The largest difference of all values and processes, measured in its tolerance."""
    differences = [difference for report in reports for difference in report.differences]
    return max(differences, key=lambda difference: difference.error / difference.tolerance)


def diagnose(
    reports: Sequence[RankReport], dtype: str, axes: dict[str, int], features: Sequence[str]
) -> Divergence | None:
    """Return the first divergence in the reports of the smallest failing run, or None.

    `axes` (axis → degree) and `features` of the run are those to blame together.
    """
    for differences in zip(*(report.differences for report in reports), strict=True):
        if any(difference.wrong for difference in differences):
            # A degree above two is left where two processes are right.
            named = [axis if degree <= 2 else f"{axis}={degree}" for axis, degree in axes.items()]
            blamed = " with ".join((*named, *features)) or "any layout"
            ratio, cause = _Seen(reports, differences, axes, features, blamed).explain()
            return Divergence(
                tensor=differences[0].name,
                dtype=dtype,
                error=max(difference.error for difference in differences),
                ratio=ratio,
                axis=blamed,
                layer=_layer(differences[0].name),
                cause=cause,
            )
    return None


def _layer(name: str) -> str:
    """The module between the last value that is right and this one."""
    kind, _, rest = name.partition("/")
    if kind in ("forward", "recomputed"):
        # What a module is given comes from the one around it.
        return rest.removesuffix(".input").rpartition(".")[0] if rest.endswith(".input") else rest
    if kind == "backward" and rest.endswith(".input"):
        return rest.removesuffix(".input")
    if kind == "backward":
        block, _, last = rest.rpartition(".")
        inside = block.endswith((".attention", ".mlp")) and last not in ("o", "down")
        return "head" if rest == "norm" else block if inside else f"what follows {rest}"
    return rest.rpartition(".")[0] if kind == "gradient" else ""


@dataclass(frozen=True)
class _Seen:
    """The first divergent value, as every process has it."""

    reports: Sequence[RankReport]
    differences: Sequence[Difference]
    axes: dict[str, int]
    features: Sequence[str]
    blamed: str

    @property
    def name(self) -> str:
        return self.differences[0].name

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    def explain(self) -> tuple[float | None, str]:
        """The factor, where there is one, and the likely cause."""
        ratio, blamed = self._common_ratio(), self.blamed
        if self.kind in ("ids", "labels"):
            return None, self._misread()
        if self.kind == "parameter" or self.name.startswith(("loss/", "norm/")):
            return None, f"the first gradients are right, and the optimizer moves otherwise with {blamed}"
        if self.kind == "rounding":
            return None, f"rounded too little: the precision is not applied with {blamed}"
        if any(math.isnan(difference.ratio) for difference in self.differences):
            return None, f"no value, no number, or another shape with {blamed}"
        if ratio is not None and abs(ratio) < self._slack:
            return 0.0, f"nothing arrives with {blamed}"
        if ratio is not None and self.kind == "loss" and self._is_mean_of_means(ratio):
            return (
                ratio,
                f"a mean of means on {blamed}: those with few labels weigh as much as those with many",
            )
        ways = math.prod(self.axes.values())
        if ways > 1 and ratio is not None and self._near(ratio, ways):
            return ratio, f"a mean missing, or a sum too many, on {blamed}"
        if ways > 1 and ratio is not None and self._near(ratio, 1 / ways):
            return ratio, f"a mean too many, or a sum missing, on {blamed}"
        for axis in self.axes:
            if self._adds_up(axis):
                what = "a sum of squares" if self.kind == "norm" else "a sum"
                return None, f"{what} missing on {axis}: the processes' parts add up to the right value"
        for axis in self.axes:
            if self._shared(axis) and not self._same_along(axis):
                return None, f"copies differ along {axis}: what its processes should share is not shared"
        if ratio is not None:
            return ratio, f"a scale that depends on {blamed}"
        if self.kind == "recomputed":
            return (
                None,
                f"the backward pass computes something else again than the forward pass did, with {blamed}",
            )
        if self.kind == "backward":
            return None, f"a gradient incomplete on {blamed}"
        return None, f"something that {blamed} computes in another way"

    def _misread(self) -> str:
        """Return the fault of the batch itself."""
        if self.kind == "labels":
            return f"labels lost on {self.blamed}: they are to be shifted before sequences are divided"
        for axis in self.axes:
            if self._same_along(axis):
                return f"every process along {axis} reads the same tokens"
        return f"tokens that are not those of their positions on {self.blamed}"

    def _is_mean_of_means(self, ratio: float) -> bool:
        return any(self._near(ratio, value) for value in self.reports[0].means_of_means)

    @property
    def _slack(self) -> float:
        return min(SLACK * self.differences[0].tolerance, MOST_SLACK)

    def _near(self, ratio: float, value: float) -> bool:
        return abs(ratio - value) <= self._slack * abs(value)

    def _common_ratio(self) -> float | None:
        """The factor by which every process's value is wrong, where it is one."""
        ratios = [difference.ratio for difference in self.differences]
        if not max(difference.residual for difference in self.differences) <= self._slack:
            return None
        spread = max(abs(ratio - ratios[0]) for ratio in ratios)
        return ratios[0] if spread <= self._slack * max(1.0, abs(ratios[0])) else None

    def _adds_up(self, axis: str) -> bool:
        """Check whether the values of the processes along `axis` sum to the wanted one."""
        if not self._shared(axis):
            return False
        for group in self._along(axis):
            wanted = self.differences[group[0]].wanted_projection
            total = sum(self.differences[place].projection for place in group)
            if not self._near(total, wanted):
                return False
        return True

    def _same_along(self, axis: str) -> bool:
        groups = self._along(axis)
        for group in groups:
            values = [self.differences[place].projection for place in group]
            if not all(self._near(value, values[0]) for value in values):
                return False
        return bool(groups)

    def _shared(self, axis: str) -> bool:
        """Check whether the processes along `axis` should all have the same part of this value."""
        groups = self._along(axis)
        return bool(groups) and all(
            self.differences[place].place == self.differences[group[0]].place
            for group in groups
            for place in group
        )

    def _along(self, axis: str) -> list[list[int]]:
        """Return the processes that differ only in `axis`; empty for ep, which is not a dimension of its own."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, report in enumerate(self.reports):
            if axis in report.coordinate:
                others = tuple(at for name, at in report.coordinate.items() if name != axis)
                groups.setdefault(others, []).append(place)
        return list(groups.values())
