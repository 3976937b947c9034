"""Made-up images, sized and normalized as a Hugging Face folder's preprocessor does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchwright.core.errors import ModelError
from torchwright.hub.folder import find_object

PATCH_PIXELS = 16 * 16
"""Operations are estimated as 2 per parameter for every patch of this many pixels: exact for a ViT-B/16, and within
a factor of 2.5 for ResNets, ConvNeXts and EfficientNets (10 against 8.2 billion for a ResNet-50)."""


class Pictures:
    """Batches of made-up pictures for a folder's model; equal indices give equal batches.

    Raises `ModelError` where nothing in the folder says how large images are, or where its statistics do not fit.
    """

    def __init__(self, folder: Path, config: dict[str, Any], batch: int) -> None:
        processor = _processor(folder)
        self.batch = batch
        self.channels = int(config.get("num_channels", 3))
        self.height, self.width = _size(folder, config, processor)
        half = [0.5] * self.channels
        normalized = processor.get("do_normalize", True)
        self.mean = tuple(processor.get("image_mean", half)) if normalized else (0.0,) * self.channels
        self.std = tuple(processor.get("image_std", half)) if normalized else (1.0,) * self.channels
        if not len(self.mean) == len(self.std) == self.channels:
            raise ModelError(
                f"{folder / 'preprocessor_config.json'} does not fit the model",
                found=f"{len(self.mean)} means and {len(self.std)} deviations for {self.channels} channels",
            )

    @property
    def patches(self) -> float:
        """Return the number of patches that one picture counts as in an estimate of operations."""
        return max(1.0, self.height * self.width / PATCH_PIXELS)

    def images(self, index: int) -> torch.Tensor:
        """Batch `index`: (B, C, H, W) float32, normalized."""
        shape = (self.channels, self.height, self.width)
        images_BCHW = torch.stack([picture(index * self.batch + i, shape) for i in range(self.batch)])
        mean_C11, std_C11 = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (images_BCHW - mean_C11) / std_C11

    def as_dict(self) -> dict[str, Any]:
        return {
            "channels": self.channels,
            "height": self.height,
            "width": self.width,
            "images": "synthetic: smooth random fields with edges",
        }


def picture(seed: int, shape: tuple[int, int, int]) -> torch.Tensor:
    """A made-up picture (C, H, W) with values in [0, 1]; equal seeds give equal pictures.

    Octaves of noise whose amplitude falls with their frequency, as in photographs (Field 1987), with three flat-ended
    half-planes of other colours over them: the edges.
    """
    random = torch.Generator().manual_seed(seed)
    C, H, W = shape
    field_CHW = torch.rand(C, 1, 1, generator=random).expand(C, H, W).clone()
    cells, amplitude = 2, 0.5
    while cells <= min(H, W):
        noise = torch.rand(1, C, cells, cells, generator=random) - 0.5
        field_CHW += (
            amplitude * nn.functional.interpolate(noise, (H, W), mode="bilinear", align_corners=False)[0]
        )
        cells, amplitude = 2 * cells, 0.6 * amplitude
    y_H1, x_1W = torch.linspace(-1, 1, H)[:, None], torch.linspace(-1, 1, W)[None]
    for angle, offset, tone in torch.rand(3, 3, generator=random).tolist():
        direction = torch.tensor(6.2832 * angle)
        inside_HW = y_H1 * direction.sin() + x_1W * direction.cos() > 1.6 * offset - 0.4
        colour_C = torch.rand(C, generator=random) - 0.5
        field_CHW += (0.3 + tone) * colour_C[:, None, None] * inside_HW
    return field_CHW.clamp(0, 1)


def _processor(folder: Path) -> dict[str, Any]:
    return find_object(folder / "preprocessor_config.json")


def _size(folder: Path, config: dict[str, Any], processor: dict[str, Any]) -> tuple[int, int]:
    """(height, width) that the model or its preprocessor names.

    Raises `ModelError` where neither does.
    """
    crop = processor.get("crop_size") if processor.get("do_center_crop", True) else None
    for value in (config.get("image_size"), crop, processor.get("size")):
        match value:
            case int():
                return value, value
            case [int() as height, int() as width]:
                return height, width
            case {"height": int() as height, "width": int() as width}:
                return height, width
            case {"shortest_edge": int() as edge}:
                return edge, edge
    raise ModelError(
        f"nothing in {folder} says how large its images are",
        allowed="image_size in config.json, or crop_size or size in preprocessor_config.json",
    )
