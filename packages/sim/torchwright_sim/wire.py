"""The frames between the host and a device's process: JSON and raw bytes, nothing that can be executed.

A frame is two lengths, a header (JSON) and a payload (bytes). Values of operators are tagged lists:

    null, true, 3, 0.5, "sum"      themselves
    ["l", [...]]                   a list
    ["t", {...}]                   a tensor of the device: where it lies in the device's memory
    ["h", dtype, "hex", plain]     a tensor of the host without dimensions; `plain`: made from a number
    ["d", "float32"]               a dtype; ["y", ...] a layout, ["m", ...] a memory format
    ["c", re, im]                  a complex number
    ["v"]                          the device itself
    ["g"]                          a generator, whose state is the frame's payload
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

import torch

LENGTHS = struct.Struct("<IQ")
MOST_HEADER = 1 << 26
"""Bytes of JSON: lists of sizes and of tensors, no contents."""
DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
LAYOUTS = {"strided": torch.strided}
FORMATS = {
    str(each).removeprefix("torch."): each
    for each in (
        torch.contiguous_format,
        torch.preserve_format,
        torch.channels_last,
        torch.channels_last_3d,
    )
}


class Closed(Exception):
    """The other end is gone."""


@dataclass(frozen=True)
class Place:
    """A tensor's place in a device's memory, as its storage and its strides have it."""

    offset: int
    """The beginning of the storage, in bytes."""
    nbytes: int
    dtype: torch.dtype
    start: int
    """In the storage, in elements."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool = False
    neg: bool = False

    def encode(self) -> list[Any]:
        flags = self.conj | self.neg << 1
        return [self.offset, self.nbytes, name(self.dtype), self.start, self.size, self.stride, flags]

    @classmethod
    def decode(cls, found: list[Any]) -> Place:
        offset, nbytes, dtype, start, size, stride, flags = found
        return cls(
            offset, nbytes, DTYPES[dtype], start, tuple(size), tuple(stride), bool(flags & 1), bool(flags & 2)
        )


def name(value: Any) -> str:
    """Return the name of a dtype, a layout or a memory format: `float32`."""
    return str(value).removeprefix("torch.")


def send(connection: socket.socket, header: dict[str, Any], payload: Any = b"") -> None:
    """Send a frame; raises `Closed`."""
    text = json.dumps(header, separators=(",", ":")).encode()
    body = memoryview(payload).cast("B")
    try:
        if len(body) < 1 << 16:
            connection.sendall(b"".join((LENGTHS.pack(len(text), len(body)), text, body)))
        else:
            connection.sendall(LENGTHS.pack(len(text), len(body)) + text)
            connection.sendall(body)
    except OSError as error:
        raise Closed(str(error)) from None


def receive(connection: socket.socket, most: int) -> tuple[dict[str, Any], bytearray]:
    """Wait for a frame with a payload of at most `most` bytes; raises `Closed`, also for bytes that are not a frame."""
    length, payload = LENGTHS.unpack(_exactly(connection, LENGTHS.size))
    if length > MOST_HEADER or payload > most:
        raise Closed(f"a frame of {length} and {payload} bytes, more than is allowed")
    header = json.loads(_exactly(connection, length))
    if not isinstance(header, dict):
        raise Closed("a frame whose header is no object")
    return header, _exactly(connection, payload)


def _exactly(connection: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    view, read = memoryview(buffer), 0
    while read < count:
        try:
            got = connection.recv_into(view[read:], min(count - read, 1 << 22))
        except OSError as error:
            raise Closed(str(error)) from None
        if not got:
            raise Closed("the connection was closed")
        read += got
    return buffer


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    if not tensor.numel():
        return memoryview(b"")
    # A contiguous tensor of one element may have any stride, with which PyTorch does not view it as bytes.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    # NumPy has no name for every dtype; bytes have one.
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def from_raw(data: bytes | bytearray, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
    """Return a CPU tensor over these bytes."""
    if not len(data):
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(size)
