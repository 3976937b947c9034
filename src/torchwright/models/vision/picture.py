"""Pictures as RGB (H, W, 3) uint8: upright, of bounded size, from untrusted files."""

from __future__ import annotations

import io
import os
import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from torchwright.core.errors import WorkloadError
from torchwright.core.regular_file import is_url

PLAIN = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
FORMATS = (*PLAIN, "AVIF", "HEIC")
"""Pillow reads AVIF since 11.3; HEIC needs the package pillow-heif."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif", ".heic", ".heif")
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
AVIF_BRANDS = (b"avif", b"avis")
MOST_BYTES = 256 * 2**20
MOST_PIXELS = 80_000_000
SHORTEST = 8
"""Pixels of a side: in fewer there is nothing to tell apart."""
SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")


class PictureError(WorkloadError, ValueError):
    """A picture that cannot be used: what it is, and why."""


def check_pillow() -> None:
    """Raise `PictureError` where Pillow, which reads and scales pictures, is not installed."""
    if find_spec("PIL") is None:
        raise PictureError(
            "pictures are read with Pillow, which is not installed",
            next="pip install 'torchwright[pictures]'",
        )


def read_picture(source: Any) -> np.ndarray:
    """A file, its content, a Pillow image or an array (H, W, 3) uint8 as RGB (H, W, 3) uint8.

    Of a file the first picture counts, turned as its EXIF says; grey, palettes and CMYK become RGB, 16 bits become 8,
    and transparency is left out, as transformers does. Raises `PictureError` naming the file and what is wrong.
    """
    check_pillow()
    from PIL import Image

    if isinstance(source, str) and is_url(source):
        raise PictureError(f"{source} is a URL", allowed="the name of a file: nothing is downloaded")
    if isinstance(source, bytes):
        return _read_content("the picture", len(source), io.BytesIO(source))
    if isinstance(source, str | os.PathLike):
        return _read_file(Path(source))
    if isinstance(source, Image.Image):
        _check_size("the picture", source.size)
        return _rgb("the picture", source)
    array = np.asarray(source)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8:
        raise PictureError(
            "the picture cannot be used",
            found=f"{array.dtype} of shape {list(array.shape)}",
            allowed="a file, a Pillow image, or uint8 of shape [height, width, 3]",
        )
    _check_size("the picture", (array.shape[1], array.shape[0]))
    return array


def _read_file(path: Path) -> np.ndarray:
    if path.exists() and not path.is_file():
        raise PictureError(f"{path} is no file")
    try:
        with path.open("rb") as file:
            return _read_content(path.name, path.stat().st_size, file)
    except FileNotFoundError as error:
        raise PictureError(f"there is no file {path}") from error
    except OSError as error:
        raise PictureError(f"{path} cannot be read", found=error.strerror) from error


def _read_content(name: str, size: int, file: BinaryIO) -> np.ndarray:
    from PIL import Image

    if size > MOST_BYTES:
        raise PictureError(f"{name} is too large", found=f"{size:,} bytes", allowed=f"{MOST_BYTES:,} bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sizes, whose limit here is lower; tags that are skipped
            with _opened(name, file) as image:
                _check_size(name, image.size)
                return _rgb(name, image)
    except Image.DecompressionBombError as error:
        count = re.search(r"[0-9]+", str(error))  # Pillow's own limit, which it names, is a higher one
        raise _too_large(name, f"{int(count[0]):,} pixels" if count else str(error)) from error
    except Image.UnidentifiedImageError as error:
        raise PictureError(
            f"{name} is no picture that can be read",
            found=f"{size:,} bytes",
            allowed=", ".join(FORMATS),
        ) from error
    except PictureError:
        raise
    except OSError as error:
        if error.errno is not None:  # the file's; without a number it is Pillow's own
            raise
        raise _damaged(name, error) from error
    except (SyntaxError, ValueError, EOFError, IndexError, ZeroDivisionError, RuntimeError) as error:
        # What Pillow's readers raise of files that are damaged; a RuntimeError is the one for AVIF.
        raise _damaged(name, error) from error


def _opened(name: str, file: BinaryIO) -> Any:
    """Open a picture with Pillow, or with pillow-heif where it is HEIC.

    Raises `PictureError` that names the missing package for AVIF and HEIC.
    """
    from PIL import Image, features

    head = file.read(64)
    file.seek(0)
    brands = {head[i : i + 4] for i in range(8, len(head) - 3, 4)} if head[4:8] == b"ftyp" else set[bytes]()
    if brands & {*AVIF_BRANDS}:
        if not features.check("avif"):
            raise PictureError(f"{name} is AVIF", next="pip install 'pillow>=11.3'")
        return Image.open(file, formats=("AVIF",))
    if not brands & {*HEIC_BRANDS}:
        return Image.open(file, formats=PLAIN)
    if find_spec("pillow_heif") is None:
        raise PictureError(f"{name} is HEIC, which Pillow does not read", next="pip install pillow-heif")
    from pillow_heif import HeifImageFile  # pyright: ignore[reportMissingImports]

    return HeifImageFile(file)  # by its class: registering it would change Pillow for the whole process


def _damaged(name: str, error: Exception) -> PictureError:
    return PictureError(f"{name} is damaged or cut short", found=str(error))


def _rgb(name: str, image: Any) -> np.ndarray:
    from PIL import ImageOps

    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode in SIXTEEN_BITS:
        grey = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise PictureError(
            f"{name} holds numbers that do not say which is white",
            found=f"mode {image.mode}",
            allowed="8 or 16 bits a channel",
        )
    return np.array(image.convert("RGB"))


def _check_size(name: str, size: tuple[int, int]) -> None:
    width, height = size
    if min(width, height) < SHORTEST:
        raise PictureError(
            f"{name} is too small", found=f"{width}x{height} pixels", allowed=f"sides of {SHORTEST} or more"
        )
    if width * height > MOST_PIXELS:
        raise _too_large(name, f"{width:,}x{height:,} pixels")


def _too_large(name: str, found: str) -> PictureError:
    return PictureError(f"{name} is too large", found=found, allowed=f"{MOST_PIXELS:,} pixels")
