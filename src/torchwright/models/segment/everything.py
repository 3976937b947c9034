"""Every object of a picture: a grid of points, three masks each, of which the good, stable and distinct ones stay.

As segment-anything's automatic mask generator (Kirillov et al., 2023) over the whole picture, without its crops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchwright.core.errors import WorkloadError
from torchwright.models.segment.masks import Box, Mask, distinct
from torchwright.models.segment.prompts import Points, Prompt

SCORE, STABILITY, ALIKE = 0.88, 0.95, 0.7
"""The least score and stability of a mask, and the largest IoU of two masks' boxes; the published settings."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Candidate:
    """A mask as the decoder gave it: in the picture's size it would take a thousand times the memory."""

    logits_SS: torch.Tensor
    score: float
    box: Box
    points: Points


def find(
    prompts: Sequence[Prompt],
    decode: Callable[[Sequence[Prompt]], tuple[torch.Tensor, torch.Tensor]],
    finished: Callable[[torch.Tensor, float, Points], Mask],
    *,
    batch: int,
    least_score: float = SCORE,
    least_stability: float = STABILITY,
    tell: Callable[[int, int], None] | None = None,
) -> list[Mask]:
    """The masks, best first, of prompts of one point each; `decode` and `finished` are a `Segmenter`'s.

    A mask stays whose score is above `least_score`, and whose stability is no less than `least_stability`.
    """
    if batch < 1:
        raise WorkloadError(f"batches of {batch} points", allowed="1 or more")
    candidates = list[_Candidate]()
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        logits_PMSS, score_PM = decode(some)
        for place, which in (score_PM > least_score).nonzero().tolist():
            logits_SS, score = logits_PMSS[place, which], float(score_PM[place, which])
            mask = finished(logits_SS, score, some[place].points)
            if mask.stability >= least_stability:
                found = _Candidate(logits_SS=logits_SS.clone(), score=score, box=mask.box, points=mask.points)
                candidates.append(found)
        if tell is not None:
            tell(first + len(some), len(prompts))
    boxes, scores = [found.box for found in candidates], [found.score for found in candidates]
    best = [candidates[number] for number in distinct(boxes, scores, ALIKE)]
    return [finished(found.logits_SS, found.score, found.points) for found in best]
