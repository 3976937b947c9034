"""Masks of the original and of the optimized model side by side, for the report."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from torchwright.models.segment.files import coloured, edge
from torchwright.models.segment.masks import Points
from torchwright.report.pictures import PictureRow, row_of

EDGE, ORIGINAL_ALONE, OPTIMIZED_ALONE = (45, 212, 191), (251, 146, 60), (96, 165, 250)
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
) -> PictureRow:
    """A row of the picture with either mask, and of where they differ; the points that were asked by are white."""
    made = [_with_mask(picture_HW3, mask, points) for mask in (before_HW, after_HW)]
    return row_of(
        title, said, dict(zip(CAPTIONS, [*made, difference(picture_HW3, before_HW, after_HW)], strict=True))
    )


def classes_beside(
    title: str, said: str, picture_HW3: np.ndarray, before_SS: torch.Tensor, after_SS: torch.Tensor
) -> PictureRow:
    """A row of the picture with either map of classes, in colours, and of where they differ."""
    height, width, _ = picture_HW3.shape
    before_HW, after_HW = (
        F.interpolate(each[None, None].float(), (height, width), mode="nearest")[0, 0].long().numpy()
        for each in (before_SS, after_SS)
    )
    changed_HW = before_HW != after_HW
    differ = difference(picture_HW3, np.zeros_like(changed_HW), changed_HW)
    return row_of(
        title,
        said,
        {
            "original": coloured(picture_HW3, before_HW),
            "optimized": coloured(picture_HW3, after_HW),
            "difference: blue where they name another class": differ,
        },
    )


def difference(picture_HW3: np.ndarray, before_HW: np.ndarray, after_HW: np.ndarray) -> np.ndarray:
    """The picture faint and grey, with what is inside of only one of the masks in that one's colour."""
    out_HW3 = _faint(picture_HW3)
    out_HW3[before_HW & ~after_HW] = ORIGINAL_ALONE
    out_HW3[after_HW & ~before_HW] = OPTIMIZED_ALONE
    return out_HW3


def _faint(picture_HW3: np.ndarray) -> np.ndarray:
    """Grey, and so dark that what is put on it stands out."""
    return np.repeat(picture_HW3.mean(-1, keepdims=True) * 0.35, 3, axis=-1).astype(np.uint8)


def _with_mask(picture_HW3: np.ndarray, inside_HW: np.ndarray, points: Points) -> np.ndarray:
    """Keep the colours inside the mask: a tint would be lost on a colourful picture."""
    out_HW3 = _faint(picture_HW3)
    out_HW3[inside_HW] = picture_HW3[inside_HW]
    out_HW3[edge(inside_HW)] = EDGE
    height, width, _ = out_HW3.shape
    arm = max(1, max(height, width) // POINT)
    for x, y in points:
        column, row = min(int(x), width - 1), min(int(y), height - 1)
        for reach, colour in ((arm + 1, 0), (arm, 255)):
            out_HW3[max(0, row - reach) : row + reach + 1, max(0, column - reach) : column + reach + 1] = (
                colour
            )
    return out_HW3
