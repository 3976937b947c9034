"""Scenes with exact masks: overlapping shapes and letters in textures of their own. Everything follows from a seed."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = 96
"""Pixels of a scene, as wide as high."""
OBJECTS = (3, 6)
FEWEST_PIXELS = 60
"""The least visible pixels of an object; with fewer it does not count as one of the scene."""
LETTERS = "ABCDEFGHJKLMNPRSTUVXYZ2345679&"
FONTS = ("DejaVuSans-Bold.ttf", "DejaVuSerif-Bold.ttf", "DejaVuSansMono-Bold.ttf")
UNSEEN = 1_000_000
"""Seeds from here on are never trained on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    picture_HW3: np.ndarray
    """RGB, uint8."""
    masks_NHW: np.ndarray
    """bool, of what is seen of each object."""


def scene(seed: int) -> Scene:
    """The scene of a seed."""
    random = np.random.default_rng(seed)
    picture_HW3 = _texture(random)
    owner_HW = np.zeros((SIDE, SIDE), np.uint8)
    for number in range(1, int(random.integers(OBJECTS[0], OBJECTS[1] + 1)) + 1):
        inside_HW = _shape(random)
        picture_HW3[inside_HW] = _texture(random)[inside_HW]
        owner_HW[inside_HW] = number
    masks = [owner_HW == number for number in range(1, int(owner_HW.max()) + 1)]
    masks = [mask for mask in masks if mask.sum() >= FEWEST_PIXELS]
    if not masks:
        return scene(seed + 10 * UNSEEN)
    return Scene(picture_HW3=picture_HW3, masks_NHW=np.stack(masks))


def point_on(mask_HW: np.ndarray, random: np.random.Generator) -> tuple[float, float]:
    """A pixel (x, y) on an object, not on its edge where it has others."""
    padded = np.pad(mask_HW, 1)
    inner = mask_HW & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    rows, columns = np.nonzero(inner if inner.any() else mask_HW)
    place = int(random.integers(len(rows)))
    return float(columns[place]) + 0.5, float(rows[place]) + 0.5


def box_of(mask_HW: np.ndarray) -> tuple[float, float, float, float]:
    """Left, top, right and bottom around an object."""
    rows, columns = np.nonzero(mask_HW)
    return float(columns.min()), float(rows.min()), float(columns.max()) + 1, float(rows.max()) + 1


def _shape(random: np.random.Generator) -> np.ndarray:
    """Which pixels a new object covers."""
    image = Image.new("L", (SIDE, SIDE))
    draw = ImageDraw.Draw(image)
    x, y = random.uniform(0.15, 0.85, 2) * SIDE
    reach, kind = random.uniform(0.12, 0.34) * SIDE, random.integers(4)
    if kind == 0:
        flat = reach * random.uniform(0.4, 1.0)
        draw.ellipse((x - reach, y - flat, x + reach, y + flat), fill=255)
    elif kind == 1:
        draw.polygon(_corners(x, y, [reach] * int(random.integers(3, 7)), random.uniform(0, 6.3)), fill=255)
    elif kind == 2:
        spikes = [reach, reach * random.uniform(0.4, 0.7)] * int(random.integers(4, 7))
        draw.polygon(_corners(x, y, spikes, random.uniform(0, 6.3)), fill=255)
    else:
        font = _font(FONTS[int(random.integers(len(FONTS)))], int(2.6 * reach) // 4 * 4 + 8)
        letter = LETTERS[int(random.integers(len(LETTERS)))]
        draw.text((x, y), letter, fill=255, font=font, anchor="mm")
    return np.asarray(image) > 127


def _corners(x: float, y: float, radii: list[float], turn: float) -> list[tuple[float, float]]:
    angles = [turn + 2 * math.pi * place / len(radii) for place in range(len(radii))]
    return [
        (x + r * math.cos(angle), y + r * math.sin(angle)) for r, angle in zip(radii, angles, strict=True)
    ]


@functools.cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size)


def _texture(random: np.random.Generator) -> np.ndarray:
    """(H, W, 3) uint8: one colour, a gradient, stripes or checks of two, with noise over it."""
    one, other = random.uniform(0, 255, (2, 3))
    y_H1, x_1W = np.mgrid[:SIDE, :1], np.mgrid[:1, :SIDE]
    down, across = y_H1[0], x_1W[1]
    kind, turn, period = random.integers(4), random.uniform(0, math.pi), random.uniform(5, 14)
    along_HW = (across * math.cos(turn) + down * math.sin(turn)) / period
    share_HW = {
        0: np.zeros((SIDE, SIDE)),
        1: np.clip(along_HW * period / SIDE, 0, 1),
        2: (along_HW % 1 > 0.5).astype(float),
        3: ((across // period + down // period) % 2).astype(float),
    }[int(kind)]
    made_HW3 = one + (other - one) * share_HW[..., None] * random.uniform(0.3, 0.8)
    made_HW3 += random.normal(0, random.uniform(2, 12), (SIDE, SIDE, 3))
    return made_HW3.clip(0, 255).astype(np.uint8)
