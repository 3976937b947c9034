"""Placements of a tensor's elements: on every process, divided over them, or a pending sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Whole:
    """Every process has the whole tensor."""


@dataclass(frozen=True)
class Partial:
    """Every process has a term; the tensor is their sum."""


@dataclass(frozen=True)
class Shard:
    """Every process has an equal part of axis `dim`, in the order of ranks.

    An axis made by merging others is `outer` runs, each of which is divided: (B, T) divided over T and flattened is one
    axis of B runs.
    """

    dim: int
    outer: int = 1

    def at(self, dim: int) -> Shard:
        """The same division on another axis."""
        return Shard(dim, self.outer)


Placement = Whole | Partial | Shard

WHOLE, PARTIAL = Whole(), Partial()


def local_shape(shape: Sequence[int], place: Placement, ways: int) -> list[int]:
    """The shape of what a process has of a tensor of `shape`."""
    sizes = list(shape)
    if isinstance(place, Shard):
        sizes[place.dim] //= ways
    return sizes


def reshaped(shard: Shard, old: Sequence[int], new: Sequence[int], ways: int) -> Shard | None:
    """Return the divided axis after a reshape; None if the division would cut across the new axes."""
    # In memory's order the tensor is (before, ways, rest): `before` runs, each divided into `ways` pieces.
    before = math.prod(old[: shard.dim]) * shard.outer
    prefix = 1
    for dim, size in enumerate(new):
        if before % prefix == 0 and size and size % (before // prefix * ways) == 0:
            return Shard(dim, before // prefix)
        prefix *= size
    return None
