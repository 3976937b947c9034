"""Writing GGUF files (version 3): metadata, tensors, and the blocks of 32 numbers that Q8_0 and Q4_0 have."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torchwright.hub.gguf.header import ALIGNMENT, ARRAY, MAGIC, TEXT, TYPES

VERSION = 3
BLOCK = 32
"""Numbers with one scale."""
NUMBERS = {kind.name: number for number, kind in TYPES.items()}
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16}
U32, I32, F32, BOOL = 4, 5, 6, 7
"""Types of values in the metadata."""
Value = bool | int | float | str | Sequence[str] | Sequence[int]


@dataclass(frozen=True)
class Stored:
    """A tensor as the file has it."""

    kind: str
    shape: tuple[int, ...]
    content: bytes


def stored(tensor: torch.Tensor, kind: str) -> Stored:
    """A float tensor in a type; blocks run along its last dimension, a multiple of 32."""
    if kind in FLOATS:
        content = tensor.to(FLOATS[kind]).contiguous().view(torch.uint8).numpy().tobytes()
    else:
        content = BLOCKS[kind](tensor.float().reshape(-1, BLOCK)).numpy().tobytes()
    return Stored(kind, tuple(tensor.shape), content)


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """(N, 32) → bytes (N, 34): a half-precision scale, 32 signed bytes."""
    scale = blocks.abs().amax(1, keepdim=True) / 127
    codes = _codes(blocks, scale).clamp(-127, 127)
    return torch.cat([_half(scale), codes.to(torch.int8).view(torch.uint8)], 1)


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """(N, 32) → bytes (N, 18): a half-precision scale, codes from -8 to 7, the first 16 in the low halves of the bytes.

    The number furthest from zero becomes -8, as ggml has it: one of the sixteen codes would lie idle otherwise.
    """
    furthest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = furthest / -8
    codes = (_codes(blocks, scale).clamp(-8, 7) + 8).to(torch.uint8)
    return torch.cat([_half(scale), codes[:, :16] | codes[:, 16:] << 4], 1)


BLOCKS = {"Q8_0": q8_0, "Q4_0": q4_0}


def write_gguf(path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, Stored]) -> None:
    """The whole file. Every block is as `TYPES` describes it."""
    infos, offset = [], 0
    for name, tensor in tensors.items():
        extents = struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        where = struct.pack("<IQ", NUMBERS[tensor.kind], offset)
        infos.append(_text(name) + struct.pack("<I", len(tensor.shape)) + extents + where)
        offset += len(tensor.content) + _gap(len(tensor.content))
    keys = b"".join(_text(key) + _value(value) for key, value in metadata.items())
    head = MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)) + keys + b"".join(infos)
    with path.open("wb") as file:
        file.write(head + bytes(_gap(len(head))))
        for tensor in tensors.values():
            file.write(tensor.content + bytes(_gap(len(tensor.content))))


def _codes(blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Whole numbers of the scale that is stored; a block of zeros has none."""
    kept = scale.half().float()
    return torch.where(kept == 0, 0.0, blocks / torch.where(kept == 0, 1.0, kept)).round()


def _half(scale: torch.Tensor) -> torch.Tensor:
    return scale.half().contiguous().view(torch.uint8)


def _gap(size: int) -> int:
    return -size % ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", BOOL, value)
        case int():
            return struct.pack("<II", U32, value)
        case float():
            return struct.pack("<If", F32, value)
        case str():
            return struct.pack("<I", TEXT) + _text(value)
    return _list(value)


def _list(values: Iterable[str] | Iterable[int]) -> bytes:
    items = list(values)
    if all(isinstance(item, int) for item in items):
        return struct.pack("<IIQ", ARRAY, I32, len(items)) + struct.pack(f"<{len(items)}i", *items)
    texts = b"".join(_text(str(item)) for item in items)
    return struct.pack("<IIQ", ARRAY, TEXT, len(items)) + texts
