"""Pictures of every kind become RGB; what is none, is damaged or too large is told in words."""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features
from sams import picture

from torchwright.models.vision.picture import MOST_BYTES, MOST_PIXELS, PictureError, read_picture


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tiff", ".webp"])
def test_lossless_files_are_read_as_they_are(tmp_path: Path, suffix: str) -> None:
    made, path = picture(33, 50), tmp_path / f"a{suffix}"
    Image.fromarray(made).save(path, **({"lossless": True} if suffix == ".webp" else {}))
    assert (read_picture(path) == made).all()
    assert (read_picture(str(path)) == made).all()
    assert (read_picture(Image.open(path)) == made).all()
    assert (read_picture(made) == made).all()


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(PictureError, match=r"pip install 'torchwright\[pictures\]'"):
        read_picture(picture(20, 30))


def test_other_kinds_of_pixels_become_rgb(tmp_path: Path) -> None:
    grey = np.random.default_rng().integers(0, 2**16, (20, 30)).astype(np.uint16)
    Image.fromarray(grey).save(tmp_path / "deep.png")
    assert (read_picture(tmp_path / "deep.png") == (grey >> 8)[:, :, None]).all()
    made = Image.fromarray(picture(20, 30))
    for mode, name in [("CMYK", "c.tiff"), ("P", "p.png"), ("RGBA", "a.png"), ("L", "l.png"), ("1", "b.png")]:
        made.convert(mode).save(tmp_path / name)
        assert (read_picture(tmp_path / name) == np.asarray(made.convert(mode).convert("RGB"))).all()
    Image.fromarray(np.random.default_rng().random((20, 30), np.float32)).save(tmp_path / "f.tiff")
    with pytest.raises(PictureError, match="which is white"):
        read_picture(tmp_path / "f.tiff")


def test_a_picture_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    made = Image.fromarray(picture(20, 30))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    made.save(tmp_path / "a.png", exif=exif)
    assert read_picture(tmp_path / "a.png").shape == (30, 20, 3)


def _png(width: int, height: int, data: bytes) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_what_is_no_picture_is_told(tmp_path: Path) -> None:
    whole = tmp_path / "whole.png"
    Image.fromarray(picture(60, 60)).save(whole)
    files = {
        "empty.png": (b"", "no picture"),
        "text.jpg": (b"hello there", "no picture"),
        "zip.png": (b"PK\x03\x04" + bytes(100), "no picture"),
        "cut.png": (whole.read_bytes()[:-700], "damaged|cut short"),
        "huge.png": (
            _png(20_000, 20_000, zlib.compress(bytes(1000))),
            f"huge.png is too large. Found: 400,000,000 pixels. Allowed: {MOST_PIXELS:,} pixels.",
        ),
        "wide.png": (_png(60_000, 2_000, zlib.compress(bytes(1000))), "too large"),
        "dot.png": (_png(1, 1, zlib.compress(bytes(4))), "too small"),
        "liar.png": (_png(500, 500, zlib.compress(bytes(1000))), "damaged|cut short"),
        "eps.png": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 50 50\n", "no picture"),
    }
    for name, (content, said) in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(PictureError, match=said) as caught:
            read_picture(tmp_path / name)
        assert name in str(caught.value)
    with pytest.raises(PictureError, match="no file"):
        read_picture(tmp_path / "nothing.png")
    with pytest.raises(PictureError, match="is no file"):
        read_picture(tmp_path)
    (tmp_path / "loop.png").symlink_to("loop.png")
    with pytest.raises(PictureError, match=r"loop.png cannot be read.*symbolic links"):
        read_picture(tmp_path / "loop.png")
    with (tmp_path / "long.png").open("wb") as file:
        file.truncate(MOST_BYTES + 1)  # a hole: nobody reads it
    with pytest.raises(PictureError, match=f"Allowed: {MOST_BYTES:,} bytes"):
        read_picture(tmp_path / "long.png")
    for wrong in (np.zeros((20, 20)), np.zeros((20, 20, 4), np.uint8), "", 3):
        with pytest.raises(PictureError):
            read_picture(wrong)


def slope(height: int, width: int) -> np.ndarray:
    """A smooth picture, which lossy formats keep."""
    y, x = np.mgrid[:height, :width]
    return np.stack([4 * y, 255 - 4 * x, 2 * (x + y)], 2).astype(np.uint8)


def test_avif_is_read(tmp_path: Path) -> None:
    if not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    made = slope(40, 56)
    Image.fromarray(made).save(tmp_path / "a.avif", quality=100)
    found = read_picture(tmp_path / "a.avif")
    assert found.shape == made.shape
    assert np.abs(found.astype(int) - made).mean() < 4
    (tmp_path / "b.avif").write_bytes((tmp_path / "a.avif").read_bytes()[:200])
    with pytest.raises(PictureError):
        read_picture(tmp_path / "b.avif")


def test_heic_is_read_or_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.heic"
    path.write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(40))
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "pillow_heif", None)
        with pytest.raises(PictureError, match=r"a\.heic is HEIC.*pip install pillow-heif"):
            read_picture(path)
    heif = pytest.importorskip("pillow_heif", reason="pillow-heif is not installed")
    made = slope(40, 56)
    heif.from_pillow(Image.fromarray(made)).save(path, quality=100)
    found = read_picture(path)
    assert found.shape == made.shape
    assert np.abs(found.astype(int) - made).mean() < 4


def test_a_url_is_refused_as_it_was_written() -> None:
    with pytest.raises(PictureError, match=r"https://host//a\.png is a URL"):
        read_picture("https://host//a.png")
