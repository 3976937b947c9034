"""Prompts for objects of a picture: points, boxes, and a grid of points over the whole picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchwright.core.errors import WorkloadError
from torchwright.models.segment.masks import Box, Points

MOST_POINTS = 64
"""The most points of one object."""
GRIDS = (1, 128)
"""Points of a grid's side, at least and at most."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The prompt for one object, in pixels of the picture."""

    points: Points = ()
    inside: tuple[bool, ...] = ()
    """For each point, True if it is on the object, False if it is outside."""
    box: Box | None = None

    @property
    def ambiguous(self) -> bool:
        """True if it may mean a part of an object or the whole: a single point."""
        return self.box is None and len(self.points) == 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """A picture as the encoder sees it."""

    height: int
    width: int
    embeddings: Any
    """Return the inputs of the family's decoder."""


def prompts_of(
    points: Sequence[Sequence[float]], outside: Sequence[Sequence[float]], boxes: Sequence[Sequence[float]]
) -> list[Prompt]:
    """One object that all points are on and none of `outside`, or one in each box; as `Segmenter.segment`."""
    every = tuple(_numbers("a point", point, 2) for point in (*points, *outside))
    inside = (True,) * len(points) + (False,) * len(outside)
    areas = [_numbers("a box", box, 4) for box in boxes]
    for left, top, right, bottom in areas:
        if left >= right or top >= bottom:
            raise WorkloadError(
                "a box is empty",
                found=f"{left:g},{top:g},{right:g},{bottom:g}",
                allowed="left,top,right,bottom",
            )
    if len(every) > MOST_POINTS:
        raise WorkloadError(f"{len(every)} points for one object", allowed=f"up to {MOST_POINTS}")
    if not points and not boxes:
        raise WorkloadError("nothing points at an object", allowed="points, boxes, or everything")
    if every and len(areas) > 1:
        raise WorkloadError("points belong to one object", found=f"{len(areas)} boxes", allowed="one box")
    if not areas:
        return [Prompt(points=every, inside=inside)]
    return [Prompt(points=every, inside=inside, box=area) for area in areas]


def _numbers(what: str, values: Sequence[float], count: int) -> Any:
    numbers = tuple(float(value) for value in values)
    if len(numbers) != count or not np.isfinite(numbers).all():
        raise WorkloadError(f"{what} has {count} finite numbers", found=", ".join(map(str, values)))
    return numbers


def check_within(prompt: Prompt, encoded: Encoded) -> None:
    """Raise `WorkloadError` for a prompt outside the picture."""
    corners = [] if prompt.box is None else [prompt.box[:2], prompt.box[2:]]
    for x, y in (*prompt.points, *corners):
        if not (0 <= x <= encoded.width and 0 <= y <= encoded.height):
            raise WorkloadError(
                "a prompt lies beside the picture",
                found=f"{x:g},{y:g}",
                allowed=f"0,0 to {encoded.width},{encoded.height}",
            )


def grid_over(encoded: Encoded, side: int) -> list[Prompt]:
    """`side` x `side` points, each in the middle of its part of the picture; raises `WorkloadError` out of bounds."""
    if not GRIDS[0] <= side <= GRIDS[1]:
        raise WorkloadError(f"a grid of {side} points a side", allowed=f"{GRIDS[0]} to {GRIDS[1]}")
    middles = [(place + 0.5) / side for place in range(side)]
    return [
        Prompt(points=((x * encoded.width, y * encoded.height),), inside=(True,))
        for y in middles
        for x in middles
    ]
