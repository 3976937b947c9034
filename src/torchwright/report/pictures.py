"""Pictures for the page: what the original made, what the optimized model made, and how they differ, in a row."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

MOST_ROWS = 6
"""On a page."""
WIDEST = 384
"""Pixels of a picture's longer side on a page; larger ones are made smaller."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    caption: str
    png: bytes
    width: int
    height: int


@dataclass(frozen=True, kw_only=True)
class PictureRow:
    """One case of the metric: its pictures from left to right."""

    title: str
    said: str
    """The difference, in words."""
    pictures: tuple[Picture, ...]


def row_of(title: str, said: str, pictures: Mapping[str, np.ndarray]) -> PictureRow:
    """A row of RGB (H, W, 3) uint8 under their captions."""
    return PictureRow(
        title=title, said=said, pictures=tuple(_picture(name, made) for name, made in pictures.items())
    )


def source(png: bytes) -> Markup:
    """A PNG as what `src` holds: the page loads nothing."""
    return Markup("data:image/png;base64," + base64.b64encode(png).decode())


def _picture(caption: str, pixels_HW3: np.ndarray) -> Picture:
    from PIL import Image

    image = Image.fromarray(pixels_HW3)
    image.thumbnail((WIDEST, WIDEST))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return Picture(caption=caption, png=file.getvalue(), width=image.width, height=image.height)
