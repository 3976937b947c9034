"""Parts: the input cut into pieces of rows, each named by what its answers depend on.

A part's name is its place and a digest of its rows, the model and the options. Whoever finds a file of that name has
its answers, whenever and wherever they were computed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torchwright.map.sources import Kind, Record, Source

PART_BYTES = 16 << 20
"""Bytes of a part's rows at most: a worker holds them with their answers, and a pipe carries them at once."""
_HEAD = struct.Struct("<QQ")


@dataclass(kw_only=True)
class Part:
    """Rows that are computed together."""

    index: int
    source: str
    kind: Kind
    first_row: int
    """The place of its first row among all rows of the run, from 0."""
    records: list[Record] = field(default_factory=list)
    digest: str = ""
    bytes_read: int = 0
    """Bytes of the input that it took, for the time that is left."""

    @property
    def name(self) -> str:
        """Return its file's name without a suffix; names sort in the order of the input."""
        return f"part-{self.index:08d}-{self.digest}"

    @property
    def rows(self) -> str:
        """Return which rows it has, in words."""
        return f"{self.first_row:,} to {self.first_row + len(self.records) - 1:,} of {self.source}"


def cut(
    sources: Iterable[Source],
    identity: str,
    *,
    rows: int,
    limit: int | None = None,
    part_bytes: int = PART_BYTES,
) -> Iterator[Part]:
    """Yield the parts of the sources, `limit` rows in all.

    A part has rows of one source: at most `rows`, and no further one once it has `part_bytes`.
    """
    index = first_row = 0
    for source in sources:
        part, size, read = _begin(index, source, first_row), 0, source.read
        for record in source.records():
            if limit is not None and first_row + len(part.records) >= limit:
                break
            part.records.append(record)
            size += len(record.raw)
            if len(part.records) == rows or size >= part_bytes:
                yield _finished(part, identity, source.read - read)
                index, first_row = index + 1, first_row + len(part.records)
                part, size, read = _begin(index, source, first_row), 0, source.read
        if part.records:
            yield _finished(part, identity, source.read - read)
            index, first_row = index + 1, first_row + len(part.records)
        if limit is not None and first_row >= limit:
            return


def _begin(index: int, source: Source, first_row: int) -> Part:
    return Part(index=index, source=source.label, kind=source.kind, first_row=first_row)


def _finished(part: Part, identity: str, read: int) -> Part:
    digest = hashlib.blake2b(f"{identity}\0{part.first_row}".encode(), digest_size=8)
    for record in part.records:
        fault = (record.fault or "").encode()
        digest.update(_HEAD.pack(record.line, len(record.raw)) + record.raw + fault)
    part.digest, part.bytes_read = digest.hexdigest(), read
    return part
