"""Pictures to what an image classifier of transformers takes, by the folder's own preprocessor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchwright.core.errors import WorkloadError
from torchwright.hub.folder import read_config
from torchwright.models.vision.picture import read_picture
from torchwright.train.data.shards import DataError
from torchwright.train.media.config import ImageData, ImageRun
from torchwright.train.media.listing import Item, Listing, hold_out, list_images, refuse
from torchwright.train.media.samples import MediaBatch
from torchwright.train.model.vocabulary import IGNORE
from torchwright.workloads.huggingface import open_picture_processor

SMALLEST, ASPECT = 0.35, 4 / 3
"""Limits of `crop`: the least share of the picture that is left, and the largest ratio of its sides."""


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """A run's data, listed."""

    labels: tuple[str, ...]
    train: Listing
    validation: Listing


class ImageTask:
    """Files to pixels and classes."""

    def __init__(self, model: Path, data: ImageData, labels: Sequence[str]) -> None:
        """Raises `ModelError` for a folder without a preprocessor that transformers knows."""
        self._places = {label: place for place, label in enumerate(labels)}
        self._augment = data.augment
        self._processor = open_picture_processor(model)

    def prepare(self, item: Item, draw: int | None) -> tuple[torch.Tensor, int]:
        """Return pixels (C, H, W), and the class's index. Raises `WorkloadError` for a file that is not a picture."""
        picture_HWC = read_picture(item.path)
        if draw is not None:
            picture_HWC = augmented(picture_HWC, self._augment, np.random.default_rng(draw))
        return self._pixels(picture_HWC), self._places[str(item.target)]

    def collate(self, samples: Sequence[tuple[torch.Tensor, int] | None]) -> MediaBatch:
        # In the place of what cannot be read stands its neighbour: batch norms see pictures alone.
        filler = next((pixels for sample in samples if sample for pixels in sample[:1]), None)
        if filler is None:
            filler = self._pixels(np.zeros((64, 64, 3), np.uint8))
        pixels_BCHW = torch.stack([sample[0] if sample else filler for sample in samples])
        labels_B = torch.tensor([sample[1] if sample else IGNORE for sample in samples])
        return MediaBatch(inputs={"pixel_values": pixels_BCHW}, labels=labels_B)

    def _pixels(self, picture_HWC: np.ndarray) -> torch.Tensor:
        try:
            return self._processor(images=picture_HWC, return_tensors="pt")["pixel_values"][0]
        except (ValueError, ZeroDivisionError) as error:  # of sides that its sizes do not take
            height, width, _ = picture_HWC.shape
            raise WorkloadError(
                "the preprocessor does not take this picture", found=f"{width}x{height}: {error}"
            ) from error


def augmented(picture_HWC: np.ndarray, how: Sequence[str], draw: np.random.Generator) -> np.ndarray:
    """A part of the picture and its mirror image, at random (Szegedy et al., 2014)."""
    if "crop" in how:
        H, W, _ = picture_HWC.shape
        area, ratio = draw.uniform(SMALLEST, 1) * H * W, ASPECT ** draw.uniform(-1, 1)
        height = min(H, max(1, round(math.sqrt(area / ratio))))
        width = min(W, max(1, round(math.sqrt(area * ratio))))
        top, left = draw.integers(H - height + 1), draw.integers(W - width + 1)
        picture_HWC = picture_HWC[top : top + height, left : left + width]
    if "flip" in how and draw.random() < 0.5:
        picture_HWC = picture_HWC[:, ::-1]
    return np.ascontiguousarray(picture_HWC)


def list_pictures(run: ImageRun, folder: Path, *, strict: bool | None = None) -> Pictures:
    """Raise `DataError` as `list_images` does, and for missing class labels."""
    data = run.data if strict is None else run.data.model_copy(update={"strict": strict})
    listed = list_images(data.train, data, folder)
    labels = _labels(data, listed, _own_labels(folder / run.model.folder))
    train, held_out = hold_out(_known(listed, labels, data), data.hold_out, data.seed, every_class=True)
    if data.validation:
        held_out = _known(list_images(data.validation, data, folder), labels, data)
    return Pictures(labels=labels, train=train, validation=held_out)


def _labels(data: ImageData, train: Listing, own: tuple[str, ...]) -> tuple[str, ...]:
    """The classes: those that are given, else the model's where they cover the data, else the data's."""
    if data.labels is not None:
        return tuple(data.labels)
    named = {item.target for item in train.items if isinstance(item.target, str)}
    if named <= {*own}:
        return own
    if len(named) < 2:
        raise DataError(
            "there is one class alone in the training data",
            found=", ".join(sorted(named)),
            next="give pictures of others, or name all classes in data.labels",
        )
    return tuple(sorted(named))


def _known(listing: Listing, labels: tuple[str, ...], data: ImageData) -> Listing:
    """The items whose class there is, named."""
    kept, known = list[Item](), {*labels}
    for source, items in listing.by_source():
        for item in items:
            target = item.target
            if isinstance(target, int) and 0 <= target < len(labels):
                target = labels[target]
            if target in known:
                kept.append(replace(item, target=target))
                continue
            reason = f"{item.target!r} is none of the {len(labels)} classes"
            if data.strict:
                raise DataError(
                    f"row {item.number} of {source} is broken",
                    found=reason,
                    allowed=", ".join(labels[:20]),
                    next="mend it, or set data.strict = false",
                )
            refuse(listing.reports[source], item, reason)
    if listing.items and not kept:
        raise DataError(
            "no picture is of a class that the model tells",
            found=", ".join(sorted({str(item.target) for item in listing.items})[:10]),
            allowed=", ".join(labels[:20]),
        )
    return Listing(kept, listing.reports)


def _own_labels(model: Path) -> tuple[str, ...]:
    """The classes of a folder's model by their names; none where its configuration has only numbers for them."""
    told: Any = read_config(model).get("id2label")
    if not isinstance(told, dict) or sorted(told, key=str) != sorted(map(str, range(len(told)))):
        return ()
    return tuple(str(told[str(place)]) for place in range(len(told)))
