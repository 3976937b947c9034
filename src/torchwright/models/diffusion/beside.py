"""Pictures in the report: the original's, the optimized model's and their difference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchwright.models.diffusion.diffuser import pixels
from torchwright.models.diffusion.score import losses_of
from torchwright.report.pictures import MOST_ROWS, PictureRow, row_of

STRONGER = 4
"""So many times is the difference shown: what a budget allows is hard to see."""


def pictures_beside(
    titles: Sequence[str], before_N3HW: torch.Tensor, after_N3HW: torch.Tensor, *, frames: int = 1
) -> list[PictureRow]:
    """A row for each pair of pictures from 0 to 1, those that look most different first.

    Of films, whose `frames` stand below one another, the frame is shown in which most of the pixels changed.
    """
    metric, losses = losses_of(before_N3HW, after_N3HW)
    rows: list[tuple[float, PictureRow]] = []
    for title, before, after, loss in zip(titles, before_N3HW, after_N3HW, losses, strict=True):
        far = (after - before).abs()
        said = f"loss by {metric} {loss:.4f}, pixels differ by {float(far.mean()):.2%} of white on average"
        if frames > 1:
            worst = int(torch.stack([part.mean() for part in far.chunk(frames, 1)]).argmax())
            title = f"{title}, frame {worst + 1} of {frames}"
            before, after, far = (each.chunk(frames, 1)[worst] for each in (before, after, far))
        shown = {
            "original": pixels(before),
            "optimized": pixels(after),
            f"difference, {STRONGER} times as strong": pixels((STRONGER * far).clamp(0, 1)),
        }
        rows.append((loss, row_of(title, said, shown)))
    return [row for _, row in sorted(rows, key=lambda each: each[0], reverse=True)[:MOST_ROWS]]
