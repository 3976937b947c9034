"""Masks of a picture: what is known of one, run lengths, boxes, how alike two are, which are the same object twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels of the picture."""
Points = tuple[tuple[float, float], ...]
"""Each (x, y)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Mask:
    """One object of a picture."""

    pixels_HW: np.ndarray
    """bool."""
    score: float
    """The model's own guess of its IoU with the object."""
    stability: float
    """IoU of the mask's cuts a little above and below its threshold; see `stability`."""
    points: Points = ()
    """The prompt's points, (x, y) in pixels."""

    @property
    def area(self) -> int:
        """Pixels."""
        return int(self.pixels_HW.sum())

    @property
    def box(self) -> Box:
        """The smallest one around it, its last pixels within; zeros for an empty mask."""
        rows, columns = (np.flatnonzero(self.pixels_HW.max(axis)) for axis in (1, 0))
        if not len(rows):
            return (0.0, 0.0, 0.0, 0.0)
        return float(columns[0]), float(rows[0]), float(columns[-1]), float(rows[-1])

    def facts(self) -> dict[str, Any]:
        """Return plain data, the pixels as COCO's run lengths."""
        return {
            "score": self.score,
            "stability": self.stability,
            "area": self.area,
            "box": list(self.box),
            "points": [list(point) for point in self.points],
            "segmentation": run_lengths(self.pixels_HW),
        }


def run_lengths(pixels_HW: np.ndarray) -> dict[str, Any]:
    """COCO's run-length encoding, not compressed: column after column, beginning with a run of what is outside."""
    flat = pixels_HW.T.reshape(-1)
    changes = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    counts = np.diff(np.concatenate([[0], changes, [flat.size]]))
    return {"size": list(pixels_HW.shape), "counts": ([0] if flat.size and flat[0] else []) + counts.tolist()}


def from_run_lengths(encoded: dict[str, Any]) -> np.ndarray:
    """The mask (H, W) of `run_lengths`. Raises `ValueError` where the runs are not as long as the picture."""
    height, width = encoded["size"]
    flat = np.repeat(np.arange(len(encoded["counts"])) % 2 == 1, encoded["counts"])
    return flat.reshape(width, height).T


def iou(one_HW: np.ndarray, other_HW: np.ndarray) -> float:
    """Intersection over union; 1 where both are empty."""
    union = int((one_HW | other_HW).sum())
    return int((one_HW & other_HW).sum()) / union if union else 1.0


def stability(logits_NHW: torch.Tensor, offset: float = 1.0) -> torch.Tensor:
    """(N,) IoU of the masks cut at `offset` above and below zero (Kirillov et al., 2023); 0 where both are empty."""
    inner_N = (logits_NHW > offset).sum((-2, -1), dtype=torch.int64)
    outer_N = (logits_NHW > -offset).sum((-2, -1), dtype=torch.int64)
    return inner_N / outer_N.clamp(min=1)


def distinct(boxes: Sequence[Box], scores: Sequence[float], most: float) -> list[int]:
    """Non-maximum suppression: of boxes with an IoU above `most` the one with the best score, best first."""
    left_N, top_N, right_N, bottom_N = np.asarray(boxes, np.float64).reshape(-1, 4).T
    area_N = (right_N - left_N) * (bottom_N - top_N)
    order, kept = np.argsort(-np.asarray(scores, np.float64), kind="stable"), list[int]()
    while len(order):
        best, rest = order[0], order[1:]
        kept.append(int(best))
        wide = np.minimum(right_N[best], right_N[rest]) - np.maximum(left_N[best], left_N[rest])
        high = np.minimum(bottom_N[best], bottom_N[rest]) - np.maximum(top_N[best], top_N[rest])
        shared = wide.clip(0) * high.clip(0)
        union = area_N[best] + area_N[rest] - shared
        order = rest[shared <= most * union]
    return kept
