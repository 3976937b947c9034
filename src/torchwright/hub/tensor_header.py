"""The header of a safetensors file, read without torch: what its tensors are and where their bytes lie."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

LONGEST = 100_000_000
"""Bytes of a header, as the safetensors library allows them."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor of a file."""

    dtype: str
    """By the format's name: BF16, I8, …"""
    shape: tuple[int, ...]
    begin: int
    end: int
    """Bytes of the file, from its start."""


def read_header(path: Path, longest: int = LONGEST) -> dict[str, Stored]:
    """Tensors by name: eight bytes of header length (at most `longest`), the header in JSON, the data.

    Raises `OSError`, and `ValueError` for a header that is none, or that speaks of bytes beyond the file's.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(longest, size - 8):
            raise ValueError(f"its header says that it is {length:,} bytes long, the file has {size:,}")
        text = file.read(length)
    try:
        header = json.loads(text)
        found = {
            str(name): Stored(
                dtype=str(entry["dtype"]),
                shape=tuple(int(extent) for extent in entry["shape"]),
                begin=8 + length + int(entry["data_offsets"][0]),
                end=8 + length + int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"its header does not say what its tensors are ({error!r})") from error
    for name, tensor in found.items():
        if not 8 + length <= tensor.begin <= tensor.end <= size:
            raise ValueError(f"{name} ends at byte {tensor.end:,} of {size:,}")
    return found
