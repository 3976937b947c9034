"""Semantic segmentation models (SegFormer and similar ones), which classify every pixel: one call per picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from torchwright.core.errors import ArtifactError, ModelError
from torchwright.hub.folder import find_object, read_config
from torchwright.models.segment.classes import ClassMap
from torchwright.models.vision.picture import check_pillow, read_picture
from torchwright.workloads.huggingface import load_model
from torchwright.workloads.pictures import Pictures

ENDING = "ForSemanticSegmentation"
AUTO = "AutoModelForSemanticSegmentation"
LARGEST_SIDE = 8192
MOST_CLASSES = 10_000
AT_ONCE = 2**26
BILINEAR = 2
RESAMPLING = range(6)
"""Pillow's numbers."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The preprocessing of a picture, as the model's folder specifies it, and the names of the classes."""

    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int
    reversed: bool
    """True if the model takes blue first."""
    labels: tuple[str, ...]

    def pixels(self, picture_HW3: np.ndarray) -> torch.Tensor:
        """(1, 3, height, width) float32: the whole picture, made as large as the model takes it."""
        from PIL import Image

        size = (self.width, self.height)
        if self.reversed:
            picture_HW3 = np.ascontiguousarray(picture_HW3[..., ::-1])
        resized = np.array(Image.fromarray(picture_HW3).resize(size, Image.Resampling(self.resample)))
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return ((torch.from_numpy(resized).permute(2, 0, 1).float() / 255 - mean) / std)[None]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, which `read_preparation` reads."""
        return {
            "height": self.height,
            "width": self.width,
            "mean": list(self.mean),
            "std": list(self.std),
            "resample": self.resample,
            "reversed": self.reversed,
            "labels": list(self.labels),
        }


def preparation_of(folder: Path) -> Preparation:
    """Read a folder's config.json and preprocessor_config.json.

    Raises `ModelError` where they do not say how large pictures are, or want other channels than red, green and blue.
    """
    config, processor = read_config(folder), find_object(folder / "preprocessor_config.json")
    pictures = Pictures(folder, config, batch=1)
    if pictures.channels != 3:
        raise ModelError(f"{folder} takes pictures of {pictures.channels} channels", allowed="3")
    if not math.isclose(processor.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-3):
        raise ModelError(f"{folder} scales pictures by {processor['rescale_factor']}", allowed="1/255")
    try:
        return read_preparation(
            {
                "height": pictures.height,
                "width": pictures.width,
                "mean": list(map(float, pictures.mean)),
                "std": list(map(float, pictures.std)),
                "resample": processor.get("resample", BILINEAR),
                "reversed": processor.get("do_flip_channel_order") is True,
                "labels": _labels(config),
            }
        )
    except (ArtifactError, TypeError, ValueError) as error:
        raise ModelError(f"{folder} does not say how pictures are prepared", found=str(error)) from error


def read_preparation(description: dict[str, Any]) -> Preparation:
    """Read the preparation that `as_dict` gave; raises `ArtifactError` for anything else, since it may be untrusted."""
    for name, most in (("height", LARGEST_SIDE), ("width", LARGEST_SIDE)):
        if not (type(description.get(name)) is int and 1 <= description[name] <= most):
            raise ArtifactError(f"{name} is {str(description.get(name))[:80]!r}", allowed=f"1 to {most}")
    for name in ("mean", "std"):
        values = description.get(name)
        if not (isinstance(values, list) and len(values) == 3 and all(map(_number, values))):
            raise ArtifactError(f"{name} is {str(values)[:80]!r}", allowed="three numbers")
    if not all(description["std"]):
        raise ArtifactError("std holds a zero")
    if description.get("resample") not in RESAMPLING or type(description["resample"]) is not int:
        raise ArtifactError(f"resample is {str(description.get('resample'))[:80]!r}", allowed="0 to 5")
    if type(description.get("reversed")) is not bool:
        raise ArtifactError(f"reversed is {str(description.get('reversed'))[:80]!r}", allowed="true or false")
    labels = description.get("labels")
    if not (
        isinstance(labels, list)
        and 1 <= len(labels) <= MOST_CLASSES
        and all(isinstance(label, str) for label in labels)
    ):
        raise ArtifactError("labels are no names of classes", allowed=f"1 to {MOST_CLASSES:,} of them")
    return Preparation(
        height=description["height"],
        width=description["width"],
        mean=tuple(description["mean"]),
        std=tuple(description["std"]),
        resample=description["resample"],
        reversed=description["reversed"],
        labels=tuple(labels),
    )


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _labels(config: dict[str, Any]) -> list[str]:
    """The classes' names in their order; numbers where config.json has none."""
    names = config.get("id2label")
    count = len(names) if isinstance(names, dict) else int(config.get("num_labels") or 2)
    names = names if isinstance(names, dict) else {}
    return [str(names.get(str(number), number)) for number in range(count)]


class ClassLogits(nn.Module):
    """A model of transformers as a plain module: forward(pixels_B3HW) → logits (B, C, h, w)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels_B3HW: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=pixels_B3HW).logits


def open_classifier(folder: Path) -> nn.Module:
    """A folder's model in float32 and eval mode; raises `ModelError` as `load_segmenter`."""
    check_pillow()
    return ClassLogits(load_model(folder, AUTO)).eval()


class ClassSegmenter:
    """A model that names what each pixel shows, opened by `load_segmenter` or from an artifact."""

    def __init__(self, preparation: Preparation, ask: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`ask` takes what `preparation.pixels` gives and answers with logits (1, C, h, w)."""
        self.preparation, self.ask = preparation, ask

    @property
    def labels(self) -> Sequence[str]:
        """The classes' names by their numbers."""
        return self.preparation.labels

    @torch.inference_mode()
    def segment(self, source: Any) -> ClassMap:
        """Return the class of each pixel of a file, Pillow image or array. Raises the errors of `read_picture`."""
        picture_HW3 = read_picture(source)
        height, width, _ = picture_HW3.shape
        logits_1CSS = self.ask(self.preparation.pixels(picture_HW3)).float().cpu()
        return ClassMap(classes_HW=largest(logits_1CSS, height, width).numpy(), labels=self.labels)


def largest(logits_1CSS: torch.Tensor, height: int, width: int, *, at_once: int = AT_ONCE) -> torch.Tensor:
    """(height, width) numbers of the likeliest classes, of logits made so large bilinearly, a few classes at a time.

    `at_once` values of the enlarged logits are in memory at any time.
    """
    count = max(1, at_once // (height * width))
    best_HW = torch.full((height, width), -math.inf)
    number_HW = torch.zeros(height, width, dtype=torch.int64)
    for first in range(0, logits_1CSS.shape[1], count):
        part = F.interpolate(logits_1CSS[:, first : first + count], (height, width), mode="bilinear")[0]
        value_HW, place_HW = part.max(0)
        better = value_HW > best_HW
        best_HW[better], number_HW[better] = value_HW[better], place_HW[better] + first
    return number_HW
