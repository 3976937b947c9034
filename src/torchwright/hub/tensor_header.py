"""The header of a safetensors file, read without torch: what its tensors are and where their bytes lie."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchwright.core.json_file import decode_json
from torchwright.core.regular_file import open_regular

LONGEST = 100_000_000
"""Bytes of a header, as the safetensors library allows them."""
LARGEST_EXTENT = 2**40


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
    """Return tensors by name: eight bytes of header length (at most `longest`), the header in JSON, the data.

    Raises `OSError`, and `ValueError` for a header that is not one, or that names bytes beyond the file's end.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(longest, size - 8):
            raise ValueError(f"its header says that it is {length:,} bytes long, the file has {size:,}")
        header = decode_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"its header does not say what its tensors are (it is a {type(header).__name__})")
    found = {
        name: _stored(name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"
    }
    for name, tensor in found.items():
        if not 8 + length <= tensor.begin <= tensor.end <= size:
            raise ValueError(f"{name[:200]} ends at byte {tensor.end:,} of {size:,}")
    return found


def _stored(name: str, entry: Any, data: int) -> Stored:
    """Return one entry of a header, its types checked; `data` is where the tensors' bytes begin."""
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"its header does not say what its tensors are ({name[:200]}: {error!r})") from error
    numbers = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    if not numbers or not isinstance(dtype, str) or any(type(n) is not int for n in (*shape, *offsets)):
        raise ValueError(f"its header does not say what its tensors are ({name[:200]}: {str(entry)[:200]})")
    if any(not 0 <= extent <= LARGEST_EXTENT for extent in shape):
        raise ValueError(f"{name[:200]} has the shape {str(shape)[:200]}")
    return Stored(dtype=dtype, shape=tuple(shape), begin=data + offsets[0], end=data + offsets[1])
