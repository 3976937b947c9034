"""Pictures and sounds that are damaged, lie about their size, or decompress to far more than they are."""

from __future__ import annotations

import functools
import io
import random
import struct
import zlib
from collections.abc import Callable

import numpy as np

PICTURES = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
SOUNDS = {"WAV": "PCM_16", "FLAC": "PCM_16", "OGG": "VORBIS", "MP3": "MPEG_LAYER_III", "AIFF": "PCM_16"}
SIDE = 60_000
"""Of a picture that is declared and not there: 3.6 billion pixels, 10.8 GB as RGB."""


def pictures() -> dict[str, bytes]:
    """Return a small good picture of each format."""
    from PIL import Image

    grid = np.indices((40, 48)).sum(0)
    image = Image.fromarray(np.stack([grid * 2, grid * 3 % 256, 255 - grid], -1).astype(np.uint8))
    return {form: _saved(image, form) for form in PICTURES}


def sounds() -> dict[str, bytes]:
    """Return a good sound of a tenth of a second in each format."""
    import soundfile

    samples = np.sin(np.arange(1600) / 9).astype(np.float32) / 3
    found = {}
    for form, kind in SOUNDS.items():
        file = io.BytesIO()
        soundfile.write(file, samples, 16_000, kind, format=form)
        found[form] = file.getvalue()
    return found


@functools.cache
def picture_bombs() -> dict[str, Callable[[], bytes]]:
    """Return makers of files of a few kilobytes that declare or decompress to gigabytes."""
    from PIL import Image

    small = {form: _saved(Image.new("RGB", (16, 16)), form) for form in ("GIF", "BMP", "JPEG", "TIFF")}
    riff = b"RIFF" + struct.pack("<I", 30) + b"WEBPVP8X" + struct.pack("<I", 10) + b"\0" * 4
    sides = (SIDE - 1).to_bytes(3, "little") * 2
    tiff = bytearray(small["TIFF"])
    bits = tiff.index(struct.pack("<HHI", 258, 3, 3)) + 4  # how many numbers the tag of bits a sample holds
    tiff[bits : bits + 4] = struct.pack("<I", 2**30)
    jpeg = bytearray(small["JPEG"])
    frame = jpeg.index(b"\xff\xc0") + 5
    jpeg[frame : frame + 4] = struct.pack(">HH", SIDE, SIDE)
    return {
        "PNG of 60,000 x 60,000": lambda: _png(SIDE, SIDE, zlib.compress(b"\0" * 10_000_000)),
        "PNG of -1 x -1": lambda: _png(2**32 - 1, 2**32 - 1, b""),
        "PNG with a text that swells": lambda: _png(
            16, 16, b"", (b"zTXt", b"a\0\0" + zlib.compress(b"x" * 10**8))
        ),
        "PNG with a profile that swells": lambda: _png(
            16, 16, b"", (b"iCCP", b"a\0\0" + zlib.compress(b"x" * 10**8))
        ),
        "PNG whose pixels swell": lambda: _png(16, 16, zlib.compress(b"\0" * 10**8)),
        "WebP of 60,000 x 60,000": lambda: riff + sides,
        "GIF of 60,000 x 60,000": lambda: (
            small["GIF"][:6] + struct.pack("<HH", SIDE, SIDE) + small["GIF"][10:]
        ),
        "BMP of 60,000 x -60,000": lambda: (
            small["BMP"][:18] + struct.pack("<ii", SIDE, -SIDE) + small["BMP"][26:]
        ),
        "JPEG of 60,000 x 60,000": lambda: bytes(jpeg),
        "AVIF": lambda: b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf" + b"\0" * 200,
        "TIFF with a tag of 2 GiB": lambda: bytes(tiff),
        "TIFF in a circle": lambda: b"II*\0\x08\0\0\0\0\0\x08\0\0\0",
    }


@functools.cache
def sound_bombs() -> dict[str, bytes]:
    """Return sounds whose headers lie about lengths, rates and channels, and files that are no sound."""
    good = sounds()
    flac = bytearray(good["FLAC"])
    flac[21:26] = bytes([flac[21] & 0xF0 | 0x0F]) + b"\xff" * 4  # 2**36 - 1 samples
    wav = good["WAV"]
    data = wav.index(b"data") + 4
    mp3 = good["MP3"]
    tag = b"ID3\x04\0\0\x7f\x7f\x7f\x7f"  # 256 MiB of tags
    picture = b"\x06" + (2**24 - 1).to_bytes(3, "big")  # a FLAC block of 16 MiB that is not there
    return {
        "FLAC of 2**36 samples": bytes(flac),
        "FLAC with a picture that is not there": bytes(good["FLAC"][:42])
        + picture
        + bytes(good["FLAC"][42:]),
        "WAV of 4 GB": wav[:data] + b"\xfe\xff\xff\xff" + wav[data + 4 :],
        "WAV of 65,535 channels": wav[:22] + b"\xff\xff" + wav[24:],
        "WAV of 4 GHz": wav[:24] + b"\xff" * 4 + wav[28:],
        "WAV of chunks without length": wav[:12] + b"LIST\0\0\0\0" * 100_000 + wav[12:],
        "MP3 behind tags that are not there": tag + mp3,
        "MP3 of many headers": mp3[:4] * 200_000,
        "a zip": b"PK\x03\x04" + b"\0" * 22 + b"\x10\0\0\0../../../a.wav" + wav,
        "a playlist": b"#EXTM3U\nfile:///etc/passwd\n",
        "a program for FFmpeg": b"ffconcat version 1.0\nfile '/etc/passwd'\n",
        "AU of 2**32 bytes": b".snd" + struct.pack(">5I", 24, 2**32 - 2, 3, 16_000, 1) + b"\0" * 400,
    }


def break_bytes(data: bytes, chance: random.Random) -> bytes:
    """Return data with one to four things wrong in it."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        place = chance.randrange(len(found)) if found else 0
        ways: tuple[Callable[[], object], ...] = (
            lambda at=place: found.__setitem__(slice(at, at + 1), chance.randbytes(1)),
            lambda at=place: found.__setitem__(slice(at, at + 4), b"\xff" * 4),
            lambda at=place: found.__setitem__(slice(at, at + 4), b"\0" * 4),
            lambda at=place: found.__delitem__(slice(at, at + chance.randrange(1, 40))),
            lambda at=place: found.__setitem__(slice(at, at), chance.randbytes(9)),
            lambda at=place: found.__setitem__(slice(at, at), found[at : at + 64] * 8),
            lambda at=place: found.__delitem__(slice(max(1, at), None)),
        )
        chance.choice(ways)()
    return bytes(found)


def _saved(image: object, form: str) -> bytes:
    file = io.BytesIO()
    image.save(file, form)  # type: ignore[attr-defined]
    return file.getvalue()


def _png(width: int, height: int, pixels: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
