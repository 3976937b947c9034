"""Which process of a sharding group holds which part of which table: cut by hand, or balanced by measured cost."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torchwright.train.recommender.embeddings.lookup import ShardTensors
from torchwright.train.recommender.embeddings.optimizers import RowOptimizer
from torchwright.train.recommender.embeddings.tables import EmbeddingError, Inputs, Table, check_tables

NARROWEST = 32
"""Columns of a part at least: narrower ones look up as many ids for less."""
SPREAD = 1.2
"""A table is cut where it costs this much more than one process's even share."""
MEASURED_ELEMENTS = 2**26
"""The elements of a table while its cost is measured: beyond that size no cache holds the rows either."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Rows and columns [begin, end) of a table, and the process of the group that holds them."""

    table: str
    owner: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def elements(self) -> int:
        return (self.rows[1] - self.rows[0]) * self.width


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The shards of one copy of the tables, and what each process is predicted to spend on them."""

    processes: int
    shards: tuple[Shard, ...]
    seconds: tuple[float, ...] = ()
    """Seconds of each process for forward and backward, if costs were measured."""

    def of(self, owner: int) -> list[Shard]:
        """One process's shards, in the order in which all processes speak of them."""
        return [shard for shard in self.shards if shard.owner == owner]

    @property
    def imbalance(self) -> float:
        """The busiest process's time over the mean; 1 is even."""
        return max(self.seconds) / statistics.mean(self.seconds) if any(self.seconds) else 1.0

    def check(self, tables: Sequence[Table]) -> None:
        """Raise `EmbeddingError` unless the shards cover every table once and every owner exists."""
        check_tables(tables)
        known = {table.name: table for table in tables}
        for shard in self.shards:
            if shard.table not in known:
                raise EmbeddingError(f"the plan has a shard of '{shard.table}'", allowed=", ".join(known))
            if not 0 <= shard.owner < self.processes:
                raise EmbeddingError(
                    f"the plan gives a shard of '{shard.table}' to process {shard.owner}",
                    allowed=f"0 to {self.processes - 1}",
                )
        for table in tables:
            shards = [shard for shard in self.shards if shard.table == table.name]
            whole = sum(shard.elements for shard in shards) == table.rows * table.dim
            apart = all(not _overlap(a, b) for i, a in enumerate(shards) for b in shards[:i])
            inside = all(shard.rows[1] <= table.rows and shard.columns[1] <= table.dim for shard in shards)
            if not (whole and apart and inside and all(shard.elements > 0 for shard in shards)):
                raise EmbeddingError(
                    f"the plan's shards do not cover the table '{table.name}' once", next="cut it with `cut`"
                )


def cut(table: Table, owners: Sequence[Sequence[int]]) -> list[Shard]:
    """A table's shards, `owners[c][r]` holding part r of the rows of part c of the columns.

    Table-wise is `[[0]]`, row-wise `[[0, 1, 2]]`, column-wise `[[0], [1], [2]]`, a grid `[[0, 1], [2, 3]]`.
    """
    if not owners or not all(owners) or len(owners) > table.dim or max(map(len, owners)) > table.rows:
        raise EmbeddingError(
            f"the table '{table.name}' of {table.rows} rows and {table.dim} columns cannot be cut so",
            found=f"{len(owners)} parts of the columns, of {[len(part) for part in owners]} parts of the rows",
        )
    return [
        Shard(table=table.name, owner=owner, rows=rows, columns=columns)
        for columns, part in zip(_ranges(table.dim, len(owners)), owners, strict=True)
        for rows, owner in zip(_ranges(table.rows, len(part)), part, strict=True)
    ]


def measure(
    tables: Sequence[Table], inputs: Inputs, optimizer: RowOptimizer, repeats: int = 5
) -> dict[str, float]:
    """Seconds of each table's look-ups and updates, forward and backward, for a batch like `inputs`.

    The median of `repeats`, on the device of the inputs; of a large table a part is made, and its ids are folded.
    """
    costs: dict[str, float] = {}
    for table in tables:
        bags = [inputs[feature] for feature in table.features]
        ids, lengths = torch.cat([bag.ids for bag in bags]), torch.cat([bag.lengths for bag in bags])
        rows = max(1, min(table.rows, MEASURED_ELEMENTS // table.dim))
        shard = ShardTensors(torch.zeros(rows, table.dim, device=ids.device), optimizer)
        anchor = torch.zeros((), requires_grad=True, device=ids.device)
        times = []
        for _ in range(repeats + 1):
            begun = time.perf_counter()
            shard.pooled(ids % rows, lengths, 1.0, anchor).sum().backward()
            if ids.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        costs[table.name] = statistics.median(times[1:])
    return costs


def plan(
    tables: Sequence[Table],
    processes: int,
    seconds: Mapping[str, float],
    memory_bytes: float = math.inf,
    bytes_per_element: float = 8,
) -> ShardPlan:
    """Shards that balance `seconds` (of `measure`) within `memory_bytes` of each process.

    A table that costs more than an even share, or that no process can hold, is cut: by columns while they stay wide,
    then by rows as well. Parts go, the costliest first, to the process with the least to do that has room (longest
    processing time first). `bytes_per_element` counts the optimizer's state. Raises `EmbeddingError`, with the numbers,
    where the tables do not fit.
    """
    check_tables(tables)
    share = sum(seconds[table.name] for table in tables) / processes
    pieces: list[tuple[float, float, Table, int, int]] = []
    parts_of: dict[str, tuple[int, int]] = {}
    for table in tables:
        size, cost = table.rows * table.dim * bytes_per_element, seconds[table.name]
        parts = max(math.ceil(size / memory_bytes), math.ceil(cost / share) if cost > SPREAD * share else 1)
        columns = max(1, min(parts, table.dim // NARROWEST))
        rows = min(math.ceil(parts / columns), table.rows)
        parts_of[table.name] = columns, rows
        count = columns * rows
        pieces += [(cost / count, size / count, table, c, r) for c in range(columns) for r in range(rows)]
    busy, held = [0.0] * processes, [0.0] * processes
    owners = {name: [[0] * rows for _ in range(columns)] for name, (columns, rows) in parts_of.items()}
    for cost, size, table, c, r in sorted(
        pieces, key=lambda piece: (-piece[0], -piece[1], piece[2].name, piece[3:])
    ):
        free = [place for place in range(processes) if held[place] + size <= memory_bytes]
        if not free:
            raise EmbeddingError(
                f"a part of the table '{table.name}' of {size / 1e9:.3g} GB fits no process any more",
                found=f"{processes} processes of {memory_bytes / 1e9:.3g} GB, {sum(held) / 1e9:.3g} GB given away",
                next="use more processes in a group",
            )
        place = min(free, key=lambda place: (busy[place], held[place]))
        busy[place] += cost
        held[place] += size
        owners[table.name][c][r] = place
    shards = [shard for table in tables for shard in cut(table, owners[table.name])]
    return ShardPlan(processes=processes, shards=tuple(shards), seconds=tuple(busy))


def _ranges(size: int, parts: int) -> list[tuple[int, int]]:
    """[0, size) in parts that differ by one at most."""
    return [(size * i // parts, size * (i + 1) // parts) for i in range(parts)]


def _overlap(a: Shard, b: Shard) -> bool:
    return all(x[0] < y[1] and y[0] < x[1] for x, y in ((a.rows, b.rows), (a.columns, b.columns)))
