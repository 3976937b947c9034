"""The header of a GGUF file, read without torch: its metadata, and its tensors' types and offsets.

The order is: magic, version, number of tensors, number of keys; then each key with its value; then each tensor's
name, extents (the innermost first), type and offset; then, at the next multiple of the alignment, the data. All
numbers are little-endian.

A file may be untrusted: every count and length is checked against the remaining bytes before anything is read.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchwright.core.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
LONGEST_KEY = 1 << 16
MOST_KEYS, MOST_TENSORS = 1 << 16, 1 << 20
MOST_EXTENTS, LARGEST_EXTENT = 4, 1 << 40
LONGEST_HEADER = 1 << 30
"""Bytes before the data; vocabularies take some 10 MB."""
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letter for each type of value."""
TEXT, ARRAY = 8, 9


@dataclass(frozen=True, kw_only=True)
class Type:
    """The storage format of a tensor's numbers."""

    name: str
    numbers: int
    """In a block."""
    bytes: int
    """Bytes of a block."""


TYPES = {
    0: Type(name="F32", numbers=1, bytes=4),
    1: Type(name="F16", numbers=1, bytes=2),
    2: Type(name="Q4_0", numbers=32, bytes=18),
    3: Type(name="Q4_1", numbers=32, bytes=20),
    6: Type(name="Q5_0", numbers=32, bytes=22),
    7: Type(name="Q5_1", numbers=32, bytes=24),
    8: Type(name="Q8_0", numbers=32, bytes=34),
    12: Type(name="Q4_K", numbers=256, bytes=144),
    13: Type(name="Q5_K", numbers=256, bytes=176),
    14: Type(name="Q6_K", numbers=256, bytes=210),
    30: Type(name="BF16", numbers=1, bytes=2),
    39: Type(name="MXFP4", numbers=32, bytes=17),
}
"""Those that are read here, by their numbers in the file."""
OTHERS = {
    10: "Q2_K",
    11: "Q3_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
}
OTHERS |= {22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0"}


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """One tensor of a file."""

    type: Type
    shape: tuple[int, ...]
    """The innermost extent last, as torch has it."""
    begin: int
    """Its first byte of the file."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) // self.type.numbers * self.type.bytes


@dataclass(frozen=True, kw_only=True)
class Header:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Check whether a file begins as a GGUF file does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> Header:
    """The header; raises `ModelError`, which names the file, for whatever is wrong with it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} is no GGUF file that can be read",
            found=str(error)[:300],
            next="fetch the file again; a download may have stopped half way",
        ) from error


class _Reader:
    """Goes through a file's bytes once, from the start; a `ValueError` says what is wrong."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0
        self.end = min(len(data), LONGEST_HEADER)

    def header(self) -> Header:
        if self._take(len(MAGIC), "magic") != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I", "version")
        if version not in VERSIONS:
            raise ValueError(f"it is of version {version}; {' and '.join(map(str, VERSIONS))} are read")
        tensors = self._count("Q", "tensors", most=MOST_TENSORS, bytes_each=8 + 4 + 8 + 4 + 8)
        keys = self._count("Q", "keys", most=MOST_KEYS, bytes_each=8 + 4 + 1)
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._text("a key", LONGEST_KEY)
            if key in metadata:
                raise ValueError(f"it has the key {key[:80]!r} twice")
            metadata[key] = self._value(self._number("I", f"the type of {key[:80]!r}"), key[:80])
        infos = [self._info() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise ValueError(f"its alignment is {alignment!r}, and no power of two from 8 on")
        begin = -(-self.at // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            if name in found:
                raise ValueError(f"it has the tensor {name[:80]!r} twice")
            found[name] = self._stored(name, shape, kind, begin, offset, alignment)
        return Header(path=self.path, metadata=metadata, tensors=found)

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text("a tensor's name", LONGEST_KEY)
        extents = self._number("I", "a tensor's number of extents")
        if not 1 <= extents <= MOST_EXTENTS:
            raise ValueError(f"the tensor {name[:80]!r} has {extents} extents")
        shape = [self._number("Q", "a tensor's extent") for _ in range(extents)]
        if not all(1 <= extent <= LARGEST_EXTENT for extent in shape):
            raise ValueError(f"the tensor {name[:80]!r} has the extents {shape}")
        kind = self._number("I", "a tensor's type")
        return name, tuple(reversed(shape)), kind, self._number("Q", "a tensor's offset")

    def _stored(
        self, name: str, shape: tuple[int, ...], kind: int, begin: int, offset: int, alignment: int
    ) -> GgufTensor:
        if kind not in TYPES:
            raise ValueError(
                f"the tensor {name[:80]!r} is {OTHERS.get(kind, f'of type {kind}')}; "
                f"{', '.join(known.name for known in TYPES.values())} are read"
            )
        stored = GgufTensor(type=TYPES[kind], shape=shape, begin=begin + offset)
        if shape[-1] % stored.type.numbers:
            raise ValueError(
                f"the tensor {name[:80]!r} of {stored.type.name} has rows of {shape[-1]} numbers"
            )
        if offset % alignment:
            raise ValueError(f"the tensor {name[:80]!r} begins at {offset}, not at a multiple of {alignment}")
        if stored.begin + stored.bytes > len(self.data):
            raise ValueError(
                f"the tensor {name[:80]!r} ends at byte {stored.begin + stored.bytes:,} of {len(self.data):,}"
            )
        return stored

    def _value(self, kind: int, key: str) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind], key)
        if kind == TEXT:
            return self._text(key, self.end)
        if kind == ARRAY:
            return self._array(key)
        raise ValueError(f"the value of {key!r} is of type {kind}")

    def _array(self, key: str) -> list[Any]:
        kind = self._number("I", key)
        if kind == TEXT:
            count = self._count("Q", f"texts of {key!r}", bytes_each=8)
            return [self._text(key, self.end) for _ in range(count)]
        if kind not in SCALARS:  # lists of lists are in the format and in no model
            raise ValueError(f"{key!r} is a list of values of type {kind}")
        size = struct.calcsize(f"<{SCALARS[kind]}")
        count = self._count("Q", f"values of {key!r}", bytes_each=size)
        return list(struct.unpack(f"<{count}{SCALARS[kind]}", self._take(count * size, key)))

    def _text(self, what: str, longest: int) -> str:
        length = self._number("Q", what)
        if length > longest:
            raise ValueError(f"{what} is {length:,} bytes long")
        # A token of a vocabulary may be a part of a character; nothing here needs it as it was.
        return self._take(length, what).decode("utf-8", "replace")

    def _count(self, letter: str, what: str, *, bytes_each: int, most: int = LONGEST_HEADER) -> int:
        count = self._number(letter, f"the number of {what}")
        if count > min(most, (self.end - self.at) // bytes_each):
            raise ValueError(f"it says that it has {count:,} {what}, with {self.end - self.at:,} bytes left")
        return count

    def _number(self, letter: str, what: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}"), what))[0]

    def _take(self, count: int, what: str) -> bytes:
        if count > self.end - self.at:
            raise ValueError(f"it ends in {what!r}: {count:,} bytes at {self.at:,} of {self.end:,}")
        taken = self.data[self.at : self.at + count]
        self.at += count
        return taken
