"""WAV headers: check the declared size of the samples, and fill in sizes that a streaming writer left open."""

from __future__ import annotations

import io
import struct
from typing import BinaryIO

from torchwright.models.speech.sound_error import SoundError

CHUNKS = 1_000
"""Chunks that are searched for the samples."""
STREAMED = (range(1), range(0x7FFFF000, 0x80000001), range(0xFFFFFF00, 0x100000000))
"""Sizes by which a writer to a pipe says that it did not know: zero, and just below 2 GiB and 4 GiB."""
LARGEST = 0xFFFFFFFF - 4096
"""The size filled in for more samples than the header can count."""


def whole_wav(name: str, file: BinaryIO) -> BinaryIO | io.RawIOBase:
    """Return the file as it is, or with the sizes of a streamed WAV filled in.

    Raises `SoundError` for a WAV that holds fewer samples than it declares: libsndfile reads it as if it were whole.
    """
    size = file.seek(0, 2)
    file.seek(0)
    head = file.read(12)
    file.seek(0)
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        return file
    place, declared = _data_chunk(file, size)
    file.seek(0)
    if declared is None:
        found = f"no data chunk in {min(place, size):,} bytes"
        raise SoundError(f"{name} is a WAV file without sound", found=found)
    there = size - place - 8
    if any(declared in sizes for sizes in STREAMED) and declared != there:
        if declared == 0 and _chunks_follow(file, place + 8, size):
            return file
        return _Patched(file, size, {4: _size(size - 8), place + 4: _size(there)})
    if declared > there:
        raise SoundError(
            f"{name} is cut short, or its header lies",
            found=f"{declared:,} bytes of sound declared at byte {place:,}, {there:,} there",
        )
    return file


def _data_chunk(file: BinaryIO, size: int) -> tuple[int, int | None]:
    """Return where the chunk of samples begins, and its declared size; or how far it was searched, and None."""
    place = 12
    for _ in range(CHUNKS):
        if place + 8 > size:
            break
        file.seek(place)
        kind, length = struct.unpack("<4sI", file.read(8))
        if kind == b"data":
            return place, length
        place += 8 + length + length % 2
    return place, None


def _chunks_follow(file: BinaryIO, place: int, size: int) -> bool:
    """Check whether whole chunks fill the rest of the file: then zero bytes of samples are true."""
    while place + 8 <= size:
        file.seek(place)
        kind, length = struct.unpack("<4sI", file.read(8))
        if not kind.isascii() or not kind.decode().isprintable():
            break
        place += 8 + length + length % 2
    file.seek(0)
    return place in (size, size + 1)


def _size(count: int) -> bytes:
    return struct.pack("<I", min(count, LARGEST))


class _Patched(io.RawIOBase):
    """A file of which a few bytes are replaced as they are read."""

    def __init__(self, file: BinaryIO, size: int, patches: dict[int, bytes]) -> None:
        self._file, self._size, self._patches = file, size, patches

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        begin = self._file.tell()
        data = bytearray(self._file.read(len(buffer)))
        for place, new in self._patches.items():
            for i, byte in enumerate(new, place - begin):
                if 0 <= i < len(data):
                    data[i] = byte
        buffer[: len(data)] = data
        return len(data)
