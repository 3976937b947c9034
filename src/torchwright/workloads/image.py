"""Image classifiers of a Hugging Face folder, judged on pictures that are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchwright.errors import ModelError, WorkloadError
from torchwright.facts import Quality
from torchwright.workloads import accuracy
from torchwright.workloads.base import Case, Run, Workload
from torchwright.workloads.huggingface import (
    load_model,
    model_files,
    parameter_count,
    read_config,
    read_object,
)

SAMPLE_IMAGES = 512
SAMPLE_OPERATIONS = 2e12
"""The metric's sample is cut to what these operations pay for, but never below 2 batches."""
PATCH_PIXELS = 16 * 16
"""Operations are estimated as 2 per parameter for every patch of this many pixels: exact for a ViT-B/16, and within
a factor of 2.5 for ResNets, ConvNeXts and EfficientNets (10 against 8.2 billion for a ResNet-50)."""
CALIBRATION_BATCHES = 4
CALIBRATION_SEED = 1_000_000


class ImageWorkload(Workload):
    """An image classifier: one batch of images.

    No data set is at hand, so the images are made up: smooth random fields with edges, the same ones every time. They
    have the spectrum of photographs and none of their content, so that close decisions are commoner than on real ones.
    Metric: top-1 agreement with the original over up to a few hundred of them; the logits' relative error beside it.
    """

    name = "image"
    supports = "…ForImageClassification"

    def __init__(self, folder: str | Path, *, batch: int = 16) -> None:
        self.folder, self.label = Path(folder), str(folder)
        if batch < 1:
            raise WorkloadError(f"batch={batch}", allowed="1 or more")
        self.batch = batch
        config = read_config(self.folder)
        processor = _processor(self.folder)
        self.channels = int(config.get("num_channels", 3))
        self.height, self.width = _size(self.folder, config, processor)
        half = [0.5] * self.channels
        normalized = processor.get("do_normalize", True)
        self.mean = tuple(processor.get("image_mean", half)) if normalized else (0.0,) * self.channels
        self.std = tuple(processor.get("image_std", half)) if normalized else (1.0,) * self.channels
        if not len(self.mean) == len(self.std) == self.channels:
            raise ModelError(
                f"{self.folder / 'preprocessor_config.json'} does not fit the model",
                found=f"{len(self.mean)} means and {len(self.std)} deviations for {self.channels} channels",
            )

    @classmethod
    def accepts(cls, folder: Path, config: dict[str, Any]) -> bool:
        return any(name.endswith("ForImageClassification") for name in config.get("architectures") or [])

    def build(self) -> nn.Module:
        return Logits(load_model(self.folder, "AutoModelForImageClassification")).eval()

    def cases(self, dtype: torch.dtype) -> list[Case]:
        return [Case(name="classify", args=(self._images(0),))]

    def calibration(self, dtype: torch.dtype) -> list[Case]:
        first = CALIBRATION_SEED // self.batch
        return [Case(name="classify", args=(self._images(first + i),)) for i in range(CALIBRATION_BATCHES)]

    def observe(self, run: Run, dtype: torch.dtype) -> torch.Tensor:
        """Logits (N, C) of every sampled image, in batches of the one shape that is timed."""
        batches = [
            run(Case(name="classify", args=(self._images(i),))).float().cpu() for i in range(self._rounds())
        ]
        return torch.cat(batches)

    def compare(self, reference: Any, candidate: Any) -> Quality:
        return accuracy.agreement(reference, candidate)

    def files(self, *, weights: bool) -> dict[str, Path]:
        return model_files(self.folder, weights=weights)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.name,
            "model": self.label,
            "batch": self.batch,
            "channels": self.channels,
            "height": self.height,
            "width": self.width,
            "images": "synthetic: smooth random fields with edges",
        }

    def properties(self, model: nn.Module) -> set[str]:
        return {"image"}

    def _rounds(self) -> int:
        """Batches of the metric's sample."""
        patches = max(1.0, self.height * self.width / PATCH_PIXELS)
        operations = 2.0 * parameter_count(self.folder) * patches * self.batch
        return max(2, int(min(SAMPLE_IMAGES / self.batch, SAMPLE_OPERATIONS / max(operations, 1.0))))

    def _images(self, index: int) -> torch.Tensor:
        """Batch `index`: (B, C, H, W) float32, normalized as the folder's preprocessor does."""
        shape = (self.channels, self.height, self.width)
        images_BCHW = torch.stack([picture(index * self.batch + i, shape) for i in range(self.batch)])
        mean_C11, std_C11 = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return ((images_BCHW - mean_C11) / std_C11).to(self.device)


class Logits(nn.Module):
    """A transformers classifier as a plain module: forward(images_BCHW) → logits (B, N)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=images_BCHW).logits


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
    path = folder / "preprocessor_config.json"
    return read_object(path) if path.is_file() else {}


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
