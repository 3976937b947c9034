"""Small videos as files, and what is wrong with some."""

from __future__ import annotations

import io
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

RATE = 8


def frames(count: int, height: int = 48, width: int = 64, seed: int = 0) -> np.ndarray:
    """Frames (N, H, W, 3) in uint8: a square that wanders over a pattern."""
    pattern = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    found = np.repeat(pattern.repeat(8, 0).repeat(8, 1)[None], count, 0)
    for place in range(count):
        left = 3 * place % (width - 12)
        found[place, 10:22, left : left + 12] = (255 - 9 * place % 200, 20, 9 * place % 256)
    return found


def encoded(
    frames_NHWC: np.ndarray,
    form: str = "mp4",
    codec: str = "mpeg4",
    rate: Any = RATE,
    every: int = 1,
    **options: str,
) -> bytes:
    """A video's file, by PyAV; a frame comes at each `every`th tick of the rate, which the header states."""
    with tempfile.TemporaryDirectory() as folder:  # FFmpeg reads a file again to put its index first
        path = Path(folder) / "video"
        _write(path, frames_NHWC, form, codec, rate, every, options)
        return path.read_bytes()


def _write(
    path: Path,
    frames_NHWC: np.ndarray,
    form: str,
    codec: str,
    rate: Any,
    every: int,
    options: dict[str, str],
) -> None:
    import av

    with av.open(str(path), "w", format=form, options=options) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames_NHWC.shape[1:3]
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for place, pixels in enumerate(frames_NHWC):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = place * every, 1 / Fraction(rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def decoded(content: bytes) -> np.ndarray:
    """All frames (N, H, W, 3) of a file, by PyAV."""
    import av

    with av.open(io.BytesIO(content)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def animated(frames_NHWC: np.ndarray, form: str = "GIF", milliseconds: int = 125, **options: Any) -> bytes:
    """An animation, by Pillow."""
    first, *others = map(Image.fromarray, frames_NHWC)
    file = io.BytesIO()
    first.save(file, form, save_all=True, append_images=others, duration=milliseconds, loop=0, **options)
    return file.getvalue()
