"""One process's values against the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchwright.train.layout import Layout
from torchwright.train.parallel.zigzag import places
from torchwright.train.prove.trace import Trace

FLOOR = 1e-2
"""A gradient smaller than this part of the typical one is measured against that: some are zero but for rounding."""
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
"""The largest relative error that counts as the same."""
NOISE = 4.0
"""For a run with lower precision: the multiple of that rounding's error on one process that counts as equal, and the
share below which something was not rounded."""
ROUNDED_LIKE = {
    "recomputed": ("forward",),
    "loss": ("forward", "parameter"),
    "norm": ("gradient", "parameter"),
}
"""Kinds of values whose errors by rounding are taken from others: three numbers' own are now large, now nothing."""
DIVIDED = ("ids", "labels", "positions", "forward", "recomputed", "backward")
"""Values of which each process has its own rows and tokens."""

Place = tuple[tuple[int, ...], ...]
"""First and last index of a part on each dimension."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference between one process's value and the reference."""

    name: str
    error: float
    """‖actual − wanted‖ over the wanted value's norm; infinite for another shape or no number."""
    tolerance: float
    """The largest error that counts as the same."""
    ratio: float = float("nan")
    """The factor that brings the wanted value nearest to the actual one."""
    residual: float = float("inf")
    """The error that remains with that factor."""
    projection: float = float("nan")
    """The actual value's product with a fixed random direction: parts of a sum add up in it."""
    wanted_projection: float = float("nan")
    """The same of the wanted value; for a gradient norm both are of squares."""
    place: Place = ()
    """Which part of the whole value it is."""

    @property
    def wrong(self) -> bool:
        return not self.error <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One process's findings."""

    coordinate: dict[str, int]
    """Its place on each mesh dimension."""
    differences: tuple[Difference, ...]
    means_of_means: tuple[float, ...]
    """The first step's loss if processes, micro-batches, or both were weighted equally, over its true value."""


class ValueComparison:
    """Values of one process held against `wanted`; `rounded` is the reference with the run's rounding, if it rounds."""

    def __init__(
        self, wanted: Trace, rounded: Trace | None, dtype: torch.dtype, layout: Layout, mesh: DeviceMesh
    ) -> None:
        self.wanted, self.layout, self.mesh = wanted, layout, mesh
        gradients = [value for name, value in wanted.values.items() if name.startswith("gradient/")]
        self.typical = (
            torch.stack([g.norm().square() for g in gradients]).sum() / sum(g.numel() for g in gradients)
        ).sqrt()
        self.tolerance, self.noise = TOLERANCES[dtype], {}
        for name, value in (rounded.values if rounded else {}).items():
            error = float(
                (value.double() - wanted.values[name]).norm() / self._scale(name, wanted.values[name])
            )
            self.noise[_kind(name)] = max(error, self.noise.get(_kind(name), 0.0))
        self.rounded = rounded

    def report(self, actual: Trace, micro_batches: int) -> RankReport:
        """Every value in the order of the steps."""
        assert self.mesh.mesh_dim_names is not None
        return RankReport(
            coordinate={axis: self.mesh.get_local_rank(axis) for axis in self.mesh.mesh_dim_names},
            differences=(*self._differences(actual), *self._unrounded(actual)),
            means_of_means=tuple(self._means_of_means(micro_batches)),
        )

    def _differences(self, actual: Trace) -> Iterator[Difference]:
        for name, value in actual.values.items():
            target, place = self.wanted.values[name.replace("recomputed/", "forward/")], ()
            kinds = ROUNDED_LIKE.get(_kind(name), (_kind(name),))
            noise = max(self.noise.get(kind, 0.0) for kind in kinds)
            tolerance = max(self.tolerance, NOISE * noise)
            scale = self._scale(name, target)
            if _kind(name) in DIVIDED:
                places = self._places(value, target, actual.positions)
                if places is None:
                    yield Difference(name=name, error=float("inf"), tolerance=tolerance)
                    continue
                part = target
                for dim, indices in enumerate(places):
                    part = part.index_select(dim, indices)
                scale = scale * (part.numel() / target.numel()) ** 0.5
                target, place = part, tuple((int(i[0]), int(i[-1])) for i in places)
            yield _difference(name, value, target, float(scale), tolerance, place)

    def _scale(self, name: str, wanted: torch.Tensor) -> torch.Tensor:
        scale = wanted.double().norm()
        if name.startswith("gradient/"):
            scale = torch.maximum(scale, FLOOR * self.typical * wanted.numel() ** 0.5)
        return scale.clamp(min=1e-300)

    def _places(
        self, value: torch.Tensor, wanted: torch.Tensor, positions: torch.Tensor | None
    ) -> list[torch.Tensor] | None:
        """Which indices of each dimension this process holds; None for a shape that no part has."""
        layout, own = self.layout, self.mesh.get_local_rank
        row = own("dp_replicate") * layout.dp_shard + own("dp_shard")
        rows = torch.arange(wanted.shape[0]).chunk(layout.batch_ways)[row]
        tokens = torch.arange(wanted.shape[1])
        if positions is not None:
            tokens = positions.clamp(max=len(tokens) - 1)
        wholes = [rows, tokens, *(torch.arange(size) for size in wanted.shape[2:])]
        if value.ndim != wanted.ndim or len(rows) != len(value):
            return None
        places = []
        for size, indices in zip(value.shape, wholes, strict=True):
            # Tensor parallelism divides tokens between blocks, heads and features inside them.
            if size == len(indices):
                places.append(indices)
            elif size * layout.tp == len(indices):
                places.append(indices.chunk(layout.tp)[own("tp")])
            else:
                return None
        return places

    def _unrounded(self, actual: Trace) -> Iterator[Difference]:
        """A difference for each kind of value that is nearer to the exact one than rounding leaves it."""
        if self.rounded is None:
            return
        for kind in ("gradient", "parameter"):
            found, usual = (self._error(trace, kind) for trace in (actual, self.rounded))
            if usual > NOISE * self.tolerance:
                right = found >= usual / NOISE
                yield Difference(
                    name=f"rounding/{kind}",
                    error=0.0 if right else float("inf"),
                    tolerance=self.tolerance,
                    ratio=found / usual,
                )

    def _error(self, trace: Trace, kind: str) -> float:
        """Return the error of all values of a kind together."""
        pairs = [
            (value.double(), self.wanted.values[name])
            for name, value in trace.values.items()
            if _kind(name) == kind and value.shape == self.wanted.values[name].shape
        ]
        wrong = sum(float((actual - wanted).square().sum()) for actual, wanted in pairs)
        return (wrong / sum(float(wanted.square().sum()) for _, wanted in pairs)) ** 0.5

    def _means_of_means(self, micro_batches: int) -> Iterator[float]:
        assert self.wanted.nll_BT is not None
        layout, T = self.layout, self.wanted.nll_BT.shape[1]
        parts = [self.wanted.nll_BT[:, places(T, part, layout.cp)] for part in range(layout.cp)]
        nll_PMRCT = torch.stack(parts, 1).reshape(
            layout.batch_ways, micro_batches, -1, layout.cp, T // layout.cp
        )
        for together in ((1, 2, 4), (0, 2, 3, 4), (2, 4)):
            means = nll_PMRCT.sum(together) / (nll_PMRCT != 0).sum(together)
            yield float(means.mean() / self.wanted.values["loss"])


def _kind(name: str) -> str:
    return name.partition("/")[0]


def _difference(
    name: str, actual: torch.Tensor, wanted: torch.Tensor, scale: float, tolerance: float, place: Place
) -> Difference:
    if actual.shape != wanted.shape or not actual.isfinite().all():
        return Difference(name=name, error=float("inf"), tolerance=tolerance, place=place)
    actual, wanted = actual.double().flatten(), wanted.double().flatten()
    square = float(wanted.dot(wanted))
    ratio = float(actual.dot(wanted)) / square if square else 1.0
    direction = torch.randn(
        wanted.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(wanted.numel())
    )
    if name.startswith("norm"):
        projections = actual.square().sum(), wanted.square().sum()
    else:
        projections = actual.dot(direction), wanted.dot(direction)
    return Difference(
        name=name,
        error=float((actual - wanted).norm()) / scale,
        tolerance=tolerance,
        ratio=ratio,
        residual=float((actual - ratio * wanted).norm()) / scale,
        projection=float(projections[0]),
        wanted_projection=float(projections[1]),
        place=place,
    )
