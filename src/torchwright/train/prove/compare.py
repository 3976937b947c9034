"""One process's values against those of the run alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchwright.train.layout import Layout
from torchwright.train.parallel.batch import own_part_of_rows, own_tokens
from torchwright.train.parallel.zigzag import places
from torchwright.train.prove.shrink import ROWS, TOKENS
from torchwright.train.prove.steps import Trace

FLOOR = 1e-2
"""A gradient smaller than this part of the typical one is measured against that: some are zero but for rounding."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How one value of one process differs from the reference."""

    name: str
    error: float
    """‖actual − wanted‖ over the wanted value's norm; infinite for another shape or no number."""
    ratio: float
    """The factor that brings the wanted value nearest to the actual one."""
    residual: float
    """The error that remains with that factor."""
    projection: float
    """The actual value's product with a fixed random direction: parts of a sum add up in it."""
    wanted_projection: float
    """The same of the wanted value; for a gradient norm both are of squares."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one process found."""

    coordinate: dict[str, int]
    """Its place on each mesh dimension."""
    differences: tuple[Difference, ...]
    mean_of_means: float
    """What the first step's loss would be if every process weighed the same, over what it is."""


def compare(actual: Trace, wanted: Trace, layout: Layout, mesh: DeviceMesh) -> RankReport:
    """Every value of `actual` against `wanted`, in the order of the steps."""
    gradients = [value for name, value in wanted.values.items() if name.startswith("gradient/")]
    typical = (
        torch.stack([g.norm().square() for g in gradients]).sum() / sum(g.numel() for g in gradients)
    ).sqrt()
    differences = []
    for name, value in actual.values.items():
        target = wanted.values[name]
        scale = target.double().norm()
        if name.startswith(("forward/", "backward/")):
            part = target[_own_part(name, layout, mesh)]
            scale = scale * (part.numel() / target.numel()) ** 0.5
            target = part
        elif name.startswith("gradient/"):
            scale = torch.maximum(scale, FLOOR * typical * target.numel() ** 0.5)
        differences.append(_difference(name, value, target, float(scale)))
    assert mesh.mesh_dim_names is not None
    return RankReport(
        coordinate={axis: mesh.get_local_rank(axis) for axis in mesh.mesh_dim_names},
        differences=tuple(differences),
        mean_of_means=_mean_of_means(wanted, layout),
    )


def _difference(name: str, actual: torch.Tensor, wanted: torch.Tensor, scale: float) -> Difference:
    if actual.shape != wanted.shape or not actual.isfinite().all():
        infinite = float("inf")
        return Difference(
            name=name,
            error=infinite,
            ratio=float("nan"),
            residual=infinite,
            projection=float("nan"),
            wanted_projection=float("nan"),
        )
    actual, wanted = actual.double().flatten(), wanted.double().flatten()
    square = float(wanted.dot(wanted))
    ratio = float(actual.dot(wanted)) / square if square else 1.0
    scale = max(scale, 1e-300)
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
        ratio=ratio,
        residual=float((actual - ratio * wanted).norm()) / scale,
        projection=float(projections[0]),
        wanted_projection=float(projections[1]),
    )


def _own_part(name: str, layout: Layout, mesh: DeviceMesh) -> tuple[slice, torch.Tensor]:
    """The rows and tokens that this process holds of an activation."""
    row, ways = own_part_of_rows(layout, mesh), layout.batch_ways
    tokens = own_tokens(TOKENS, layout, mesh)
    if not name.endswith("/norm"):
        # Between blocks tensor parallelism divides the tokens.
        tokens = tokens.chunk(layout.tp)[mesh.get_local_rank("tp")]
    return slice(row * ROWS // ways, (row + 1) * ROWS // ways), tokens


def _mean_of_means(wanted: Trace, layout: Layout) -> float:
    assert wanted.nll_BT is not None
    means = [
        part.sum() / (part != 0).sum()
        for rows in wanted.nll_BT.chunk(layout.batch_ways)
        for part in (rows[:, places(TOKENS, cp, layout.cp)] for cp in range(layout.cp))
    ]
    return float(torch.stack(means).mean() / wanted.values["loss"])
