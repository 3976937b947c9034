"""Similarity of two models' masks: IoU mask for mask, with an interval over pictures and their prompts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from torchwright.core.errors import WorkloadError
from torchwright.core.records import Quality

FAINTEST = 1e-6
"""Mask logits that are all closer to zero than this are rounding: transformers' untrained SAM gives 1e-20."""
RESAMPLED = 1000
"""Times that the sample is drawn again for its interval."""
ONES = torch.tensor([value.bit_count() for value in range(256)], dtype=torch.uint8)


def packed(logits_PMSS: torch.Tensor) -> torch.Tensor:
    """(P, M, S²/8) uint8: which pixels are in the masks, a bit each."""
    inside = (logits_PMSS > 0).flatten(2).cpu().numpy()
    return torch.from_numpy(np.packbits(inside, axis=-1))


def unpacked(bits: torch.Tensor) -> torch.Tensor:
    """(S, S) float32 of one mask's bits (S²/8): 1 inside and -1 outside."""
    inside = np.unpackbits(bits.numpy())
    side = math.isqrt(len(inside))
    return torch.from_numpy(inside.astype(np.float32) * 2 - 1).reshape(side, side)


def overlap(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """(…) IoU of masks (…, S²/8) as `packed` gives them; 1 where both are empty."""
    both, either = (_count(bits) for bits in (one & other, one | other))
    return torch.where(either == 0, 1.0, both / either.clamp(min=1))


def _count(bits: torch.Tensor) -> torch.Tensor:
    return ONES[bits.int()].sum(-1, dtype=torch.float64)


def mask_quality(reference: dict[str, Any], candidate: dict[str, Any]) -> Quality:
    """Mean IoU of a model's masks with the original's; the drop is one minus it.

    Both hold `masks`, a tensor (P, M, S²/8) for each picture, `scores`, one (P, M), and `largest`, of the logits. The
    interval is of a bootstrap that draws pictures, and of each of those prompts (Davison and Hinkley 1997, 3.8).

    Raises `WorkloadError` where either's logits are not numbers, or the original's are all but zero.
    """
    _check_logits(reference["largest"], candidate["largest"])
    ious = [overlap(a, b) for a, b in zip(reference["masks"], candidate["masks"], strict=True)]
    iou_QP = torch.stack([iou_PM.mean(1) for iou_PM in ious]).numpy()
    mean = float(iou_QP.mean())
    low, high = _bounds(1 - iou_QP)
    flat = torch.cat([iou_PM.flatten() for iou_PM in ious]).sort().values
    best = [
        (a.argmax(1) == b.argmax(1)).double().mean()
        for a, b in zip(reference["scores"], candidate["scores"], strict=True)
    ]
    return Quality(
        metric="mask IoU",
        value=mean,
        reference=1.0,
        drop=1 - mean,
        drop_low=min(low, 1 - mean),
        drop_high=max(high, 1 - mean),
        higher_is_better=True,
        samples=iou_QP.size,
        extras={
            "worst_tenth": float(flat[: max(1, len(flat) // 10)].mean()),
            "same_best_mask": float(torch.stack(best).mean()),
        },
    )


def _bounds(drop_QP: np.ndarray) -> tuple[float, float]:
    """The middle 95% of means over samples drawn again: pictures, and prompts of each."""
    random = np.random.default_rng(0)
    Q, P = drop_QP.shape
    means = np.empty(RESAMPLED)
    for turn in range(RESAMPLED):
        pictures = random.integers(0, Q, Q)
        means[turn] = drop_QP[pictures[:, None], random.integers(0, P, (Q, P))].mean()
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def _check_logits(original: float, candidate: float) -> None:
    for who, largest in (("the original", original), ("a candidate", candidate)):
        if not np.isfinite(largest):
            raise WorkloadError(f"the mask logits of {who} are not numbers", found=str(largest))
    if original < FAINTEST:
        raise WorkloadError(
            "the original's masks mean nothing: what is in them is decided by rounding",
            found=f"mask logits of {original:.0e} at most",
            allowed=f"{FAINTEST:g} or more",
            next="give trained weights; those that transformers begins with are too small",
        )
