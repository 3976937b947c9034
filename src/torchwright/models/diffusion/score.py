"""Similarity of pictures: LPIPS if its weights are available, and multi-scale structural similarity."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from torchwright.core.errors import WorkloadError
from torchwright.core.intervals import mean_bounds
from torchwright.core.records import Quality
from torchwright.models.diffusion.perceptual import find_backbone, lpips

SSIM = "multi-scale SSIM"
WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
"""Weights of the scales, the finest first (Wang, Simoncelli and Bovik 2003)."""
WINDOW, SIGMA = 11, 1.5
STABLE = (0.01**2, 0.03**2)
"""The constants that keep the quotients of flat places finite, for values from 0 to 1."""


def ms_ssim(before_N3HW: torch.Tensor, after_N3HW: torch.Tensor) -> torch.Tensor:
    """Return the MS-SSIM of each pair of pictures from 0 to 1: (N,) float64, 1 if they are equal.

    Follows Wang, Simoncelli and Bovik (2003), over those of the five scales whose sides hold the window's 11 pixels.
    The weights of these scales are normalized to 1. Raises `WorkloadError` for smaller sides.
    """
    before, after = before_N3HW.double(), after_N3HW.double()
    shortest = min(before.shape[-2:])
    scales = [scale for scale in range(len(WEIGHTS)) if shortest >> scale >= WINDOW]
    if before.shape != after.shape or not scales:
        raise WorkloadError(
            "the pictures cannot be set side by side",
            found=f"{list(before.shape)} and {list(after.shape)}",
            allowed=f"equal shapes with sides of {WINDOW} pixels or more",
        )
    weights = torch.tensor(WEIGHTS[: len(scales)], dtype=torch.float64)
    weights /= weights.sum()
    found = torch.ones(len(before), dtype=torch.float64)
    for scale in scales:
        luminance_N, structure_N = _similarity(before, after)
        here_N = structure_N * luminance_N if scale == scales[-1] else structure_N
        found *= here_N.clamp(min=0) ** weights[scale]
        before, after = F.avg_pool2d(before, 2), F.avg_pool2d(after, 2)
    return found


def _similarity(before: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean luminance-and-structure quotient's two factors of each picture, under a Gaussian window."""
    place = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    line = torch.exp(-(place**2) / (2 * SIGMA**2))
    line /= line.sum()
    channels = before.shape[1]
    across = line.view(1, 1, 1, -1).expand(channels, 1, 1, -1)
    down = line.view(1, 1, -1, 1).expand(channels, 1, -1, 1)

    def mean(picture: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.conv2d(picture, across, groups=channels), down, groups=channels)

    x, y = mean(before), mean(after)
    xx, yy, xy = mean(before * before) - x * x, mean(after * after) - y * y, mean(before * after) - x * y
    luminance = (2 * x * y + STABLE[0]) / (x * x + y * y + STABLE[0])
    structure = (2 * xy + STABLE[1]) / (xx + yy + STABLE[1])
    return luminance.mean((1, 2, 3)), structure.mean((1, 2, 3))


def alike(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> Quality:
    """Compare pictures (N, 3, H, W), with Student's interval, and return the cosine of their latents (N, …) as well.

    The drop is the mean LPIPS if the package and AlexNet's weights are available, else one minus the mean of
    multi-scale SSIM. Raises `WorkloadError` for pictures that differ in shape or hold NaN, and for fewer than two.
    """
    if len(before["pictures"]) < 2:
        raise WorkloadError(
            "the metric's sample has no interval", found="1 picture", allowed="2 prompts or more"
        )
    if not all(torch.isfinite(after[name]).all() for name in after):
        raise WorkloadError("the pictures are not numbers", next="keep the parts that overflow in float32")
    ssim_N = ms_ssim(before["pictures"], after["pictures"])
    metric, losses = losses_of(before["pictures"], after["pictures"])
    plain = metric == SSIM
    cosine_N = F.cosine_similarity(
        before["latents"].double().flatten(1), after["latents"].double().flatten(1)
    )
    drop = sum(losses) / len(losses)
    low, high = mean_bounds(losses)
    return Quality(
        metric=metric,
        value=1 - drop if plain else drop,
        reference=1.0 if plain else 0.0,
        drop=drop,
        drop_low=low,
        drop_high=high,
        higher_is_better=plain,
        samples=len(losses),
        extras={"worst_ssim": ssim_N.min().item(), "latents_cosine": cosine_N.mean().item()}
        | ({} if plain else {"mean_ssim": ssim_N.mean().item(), "worst_lpips": max(losses)}),
    )


def losses_of(before_N3HW: torch.Tensor, after_N3HW: torch.Tensor) -> tuple[str, list[float]]:
    """The metric that can be had here, and what each picture loses by it: 0 where nothing has changed."""
    backbone = find_backbone(sides(before_N3HW))
    if isinstance(backbone, str):
        return SSIM, (1 - ms_ssim(before_N3HW, after_N3HW)).tolist()
    return "LPIPS", lpips(backbone, before_N3HW, after_N3HW).tolist()


def sides(pictures_N3HW: torch.Tensor) -> tuple[int, int]:
    """Height and width in pixels."""
    height, width = pictures_N3HW.shape[-2:]
    return height, width
