"""A picture's file. No torch here."""

from __future__ import annotations

import importlib.util
import io

import numpy as np

from torchwright.core.errors import ModelError

FRAME_MS = 125
"""Milliseconds that a film shows each of its frames."""
INSTALL = "`pip install 'torchwright[diffusion]'`"


def check_pictures() -> None:
    """Raises `ModelError` where Pillow, which writes pictures, is not installed."""
    if importlib.util.find_spec("PIL") is None:
        raise ModelError("pictures are written with Pillow, which is not installed", next=INSTALL)


def encoded(pixels_HW3: np.ndarray, form: str = "png", quality: int | None = None) -> bytes:
    """A picture's file: `form` is one of Pillow's; `quality` from 0 to 100 is of forms that lose something."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels_HW3).save(file, format=form, **({} if quality is None else {"quality": quality}))
    return file.getvalue()


def encoded_film(frames_FHW3: np.ndarray) -> bytes:
    """An animated PNG; of one frame, a picture's file."""
    from PIL import Image

    if len(frames_FHW3) == 1:
        return encoded(frames_FHW3[0])
    file = io.BytesIO()
    first, *others = (Image.fromarray(frame) for frame in frames_FHW3)
    first.save(file, format="png", save_all=True, append_images=others, duration=FRAME_MS, loop=0)
    return file.getvalue()
