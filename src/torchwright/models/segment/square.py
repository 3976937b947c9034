"""Shared preprocessing of the model families, from a picture to the encoder's square."""

from __future__ import annotations

import torch

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Means and deviations of ImageNet's red, green and blue, from 0 to 1."""


def normalized(picture_3HW: torch.Tensor) -> torch.Tensor:
    """Float values (…, 3, H, W) from 0 to 255 at ImageNet's mean and deviation."""
    mean, deviation = (torch.tensor(values)[:, None, None] for values in (MEAN, DEVIATION))
    return (picture_3HW / 255 - mean) / deviation
