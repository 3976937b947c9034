"""Masks as files: a PNG each, all of them as run lengths, and a picture to look at."""

from __future__ import annotations

import colorsys
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchwright.core.errors import WorkloadError
from torchwright.models.segment.classes import ClassMap
from torchwright.models.segment.masks import Mask

MASKS, OVERLAY, CLASSES = "masks.json", "overlay.png", "classes.png"
GOLDEN = 0.618033988749895
"""Turns of the hue from one mask to the next: neighbours differ, and no two are the same."""


def check_target(folder: Path) -> None:
    """Raises `WorkloadError` for a folder that holds something else than masks, which would go."""
    if folder.exists() and not (folder / MASKS).is_file():
        raise WorkloadError(
            f"{folder} is there already and holds no masks", next="choose another output folder"
        )


def write_masks(folder: Path, picture_HW3: np.ndarray, masks: Sequence[Mask]) -> None:
    """FOLDER/000.png …, masks.json and overlay.png; earlier masks are removed when the new files are complete.

    Raises as `check_target`.
    """
    facts = [{"file": f"{number:03}.png", **mask.facts()} for number, mask in enumerate(masks)]
    files = ((f"{number:03}.png", _white(mask.pixels_HW)) for number, mask in enumerate(masks))
    _write(folder, facts, files, overlaid(picture_HW3, masks))


def write_classes(folder: Path, picture_HW3: np.ndarray, found: ClassMap) -> None:
    """The same of a map of classes: a mask for each that is there, by its number, and classes.png with the numbers."""
    facts = [{"file": f"{number:03}.png", **found.facts(number)} for number in found.present]
    numbers_HW = found.classes_HW.astype(np.uint8 if len(found.labels) <= 256 else np.uint16)
    masks = ((f"{number:03}.png", _white(found.classes_HW == number)) for number in found.present)
    files = itertools.chain(masks, [(CLASSES, numbers_HW)])
    _write(folder, facts, files, coloured(picture_HW3, found.classes_HW))


def _white(inside_HW: np.ndarray) -> np.ndarray:
    return inside_HW.astype(np.uint8) * 255


def _write(
    folder: Path,
    facts: list[dict[str, Any]],
    files: Iterable[tuple[str, np.ndarray]],
    overlay_HW3: np.ndarray,
) -> None:
    from PIL import Image

    check_target(folder)
    new = folder.with_name(f".{folder.name}.{os.getpid()}")
    new.mkdir(parents=True)
    try:
        for name, pixels_HW in files:
            Image.fromarray(pixels_HW).save(new / name)
        height, width, _ = overlay_HW3.shape
        told = {"height": height, "width": width, "masks": facts}
        (new / MASKS).write_text(json.dumps(told, allow_nan=False) + "\n", encoding="utf-8")
        Image.fromarray(overlay_HW3).save(new / OVERLAY)
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def overlaid(picture_HW3: np.ndarray, masks: Sequence[Mask]) -> np.ndarray:
    """The picture with each mask in a colour of its own and its edge bright; the largest lie lowest."""
    out_HW3 = picture_HW3.astype(np.float32)
    order = sorted(range(len(masks)), key=lambda number: -masks[number].area)
    for number in order:
        inside_HW = masks[number].pixels_HW
        colour = _colour(number)
        out_HW3[inside_HW] = 0.5 * out_HW3[inside_HW] + 0.5 * colour
        out_HW3[edge(inside_HW)] = colour
    return out_HW3.round().astype(np.uint8)


def coloured(picture_HW3: np.ndarray, classes_HW: np.ndarray) -> np.ndarray:
    """The picture with each class in a colour of its own, the same in every picture."""
    palette = np.stack([_colour(number) for number in range(int(classes_HW.max()) + 1)])
    return (0.4 * picture_HW3 + 0.6 * palette[classes_HW]).round().astype(np.uint8)


def _colour(number: int) -> np.ndarray:
    """Red, green and blue from 0 to 255."""
    return np.array(colorsys.hsv_to_rgb(number * GOLDEN % 1, 0.8, 1.0), np.float32) * 255


def edge(inside_HW: np.ndarray) -> np.ndarray:
    """Return the pixels of a mask with a neighbour outside the mask, or at the picture's border."""
    padded = np.pad(inside_HW, 1)
    around = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return inside_HW & ~around
