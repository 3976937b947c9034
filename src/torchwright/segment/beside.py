"""Masks of the original and of the optimized model beside each other, for the report."""

from __future__ import annotations

import numpy as np

from torchwright.report.pictures import Row, row_of
from torchwright.segment.files import edge
from torchwright.segment.masks import Points

MASK, ORIGINAL_ALONE, OPTIMIZED_ALONE = (45, 212, 191), (251, 146, 60), (96, 165, 250)
"""Red, green and blue from 0 to 255."""
CAPTIONS = (
    "original",
    "optimized",
    "difference: orange the original's alone, blue the optimized model's alone",
)
POINT = 160
"""A point's cross is so many times shorter than the picture."""


def masks_beside(
    title: str,
    said: str,
    picture_HW3: np.ndarray,
    before_HW: np.ndarray,
    after_HW: np.ndarray,
    points: Points,
) -> Row:
    """A row of the picture with either mask, and of where they differ; the points that were asked by are white."""
    made = [_with_mask(picture_HW3, mask, points) for mask in (before_HW, after_HW)]
    return row_of(
        title, said, dict(zip(CAPTIONS, [*made, difference(picture_HW3, before_HW, after_HW)], strict=True))
    )


def difference(picture_HW3: np.ndarray, before_HW: np.ndarray, after_HW: np.ndarray) -> np.ndarray:
    """The picture faint and grey, with what is inside of only one of the masks in that one's colour."""
    grey_HW1 = picture_HW3.mean(-1, keepdims=True) * 0.35
    out_HW3 = np.repeat(grey_HW1, 3, axis=-1).astype(np.uint8)
    out_HW3[before_HW & ~after_HW] = ORIGINAL_ALONE
    out_HW3[after_HW & ~before_HW] = OPTIMIZED_ALONE
    return out_HW3


def _with_mask(picture_HW3: np.ndarray, inside_HW: np.ndarray, points: Points) -> np.ndarray:
    out_HW3 = picture_HW3.copy()
    out_HW3[inside_HW] = (0.5 * out_HW3[inside_HW] + 0.5 * np.array(MASK)).astype(np.uint8)
    out_HW3[edge(inside_HW)] = MASK
    height, width, _ = out_HW3.shape
    arm = max(1, max(height, width) // POINT)
    for x, y in points:
        column, row = min(int(x), width - 1), min(int(y), height - 1)
        for reach, colour in ((arm + 1, 0), (arm, 255)):
            out_HW3[max(0, row - reach) : row + reach + 1, max(0, column - reach) : column + reach + 1] = (
                colour
            )
    return out_HW3
