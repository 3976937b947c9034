"""Maps of classes: which pixel is what, IoU class by class, and what is written of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchwright.core.errors import WorkloadError
from torchwright.core.records import Quality
from torchwright.models.segment.masks import run_lengths

RESAMPLED = 1000
"""Times that the sample is drawn again for its interval."""
FEWEST_SHARE = 1e-3
"""The least share of the sample's pixels: a class with fewer in the original's maps does not count in a mean over
classes.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassMap:
    """The class of each pixel of a picture."""

    classes_HW: np.ndarray
    """int64."""
    labels: Sequence[str]
    """The classes' names by their numbers."""

    @property
    def present(self) -> list[int]:
        """The numbers of the classes that are there, the largest area first."""
        areas = np.bincount(self.classes_HW.ravel(), minlength=len(self.labels))
        return [int(number) for number in np.argsort(-areas, kind="stable") if areas[number]]

    def facts(self, number: int) -> dict[str, Any]:
        """A class as plain data, its pixels as COCO's run lengths."""
        inside_HW = self.classes_HW == number
        return {
            "class": number,
            "label": self.labels[number],
            "area": int(inside_HW.sum()),
            "share": float(inside_HW.mean()),
            "segmentation": run_lengths(inside_HW),
        }


def counts_of(before_HW: torch.Tensor, after_HW: torch.Tensor, classes: int) -> torch.Tensor:
    """(3, C) pixels of each class: in both maps, in the first, in the second."""
    before, after = before_HW.flatten().long(), after_HW.flatten().long()
    both = torch.bincount(before[before == after], minlength=classes)
    return torch.stack(
        [both, torch.bincount(before, minlength=classes), torch.bincount(after, minlength=classes)]
    )


def class_quality(reference: dict[str, Any], candidate: dict[str, Any]) -> Quality:
    """Mean IoU over the classes of a model's maps with the original's; the drop is one minus it.

    Both hold `maps`, a tensor (H, W) of class numbers for each picture, `classes`, how many there are, and `finite`,
    whether all logits are numbers. A class counts that has `FEWEST_SHARE` of the original's pixels. The interval is of
    a bootstrap that draws pictures.

    Raises `WorkloadError` where either's logits are not numbers.
    """
    for who, seen in (("the original", reference), ("a candidate", candidate)):
        if not seen["finite"]:
            raise WorkloadError(f"the logits of {who} are not numbers")
    pairs = zip(reference["maps"], candidate["maps"], strict=True)
    counts_Q3C = torch.stack([counts_of(a, b, reference["classes"]) for a, b in pairs]).double().numpy()
    ious_C = _ious(counts_Q3C.sum(0))
    drop = 1 - float(ious_C.mean())
    random = np.random.default_rng(0)
    drawn = random.integers(0, len(counts_Q3C), (RESAMPLED, len(counts_Q3C)))
    drops = [1 - float(_ious(counts_Q3C[places].sum(0)).mean()) for places in drawn]
    low, high = np.quantile(drops, (0.025, 0.975))
    both, before, _ = counts_Q3C.sum((0, 2))
    return Quality(
        metric="class IoU",
        value=1 - drop,
        reference=1.0,
        drop=drop,
        drop_low=min(float(low), drop),
        drop_high=max(float(high), drop),
        higher_is_better=True,
        samples=len(counts_Q3C),
        extras={
            "classes": float(len(ious_C)),
            "worst_class": float(ious_C.min()),
            "same_pixels": float(both / before),
        },
    )


def _ious(counts_3C: np.ndarray) -> np.ndarray:
    """Return the IoU of each class that counts."""
    both_C, before_C, after_C = counts_3C
    counted = before_C >= FEWEST_SHARE * before_C.sum()
    return (both_C / (before_C + after_C - both_C).clip(1))[counted]
