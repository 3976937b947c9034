"""A recommender with tables too large for one device, on paper: 2D sparse parallelism over a described cluster.

Every group of devices holds all tables once, sharded; replicas of a shard lie in different groups and are averaged
every few steps (TorchRec's DMPCollection; Zhang et al., 2025, arXiv 2508.03854). Tables above a device's fair share are
cut by columns, then by rows as well (grid sharding); the pieces are placed by falling cost or size.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchwright.core.errors import TorchwrightError
from torchwright.train.planning.cluster import Cluster, RankGroup
from torchwright.train.planning.enumerate import divisors

ID_BYTES = 8
NARROWEST = 16
"""Columns of a piece, at least: below, a lookup wastes most of what it reads."""
STATE_BYTES = 4
"""Row-wise Adagrad keeps one float32 for a row."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """`count` embedding tables of one size."""

    count: int
    rows: int
    dim: int
    pooling: float
    """Rows that a sample looks up in each, summed to one vector."""


@dataclass(frozen=True, kw_only=True)
class RecommenderJob:
    """The model and its batch."""

    tables: tuple[Tables, ...]
    dense_parameters: int
    """Parameters of the dense layers, which every sample passes once and every device holds."""
    samples: int
    """Samples of a device's batch."""
    width: int = 2
    """Bytes of a table's entry, and of one in an exchange."""
    compute: str = "bfloat16"
    """The dtype in which the dense layers compute."""

    @property
    def table_bytes(self) -> float:
        """Bytes of all tables and their optimizer state."""
        return sum(kind.count * self.bytes_of(kind) for kind in self.tables)

    @property
    def vectors(self) -> int:
        """Numbers that all tables together give for one sample."""
        return sum(kind.count * kind.dim for kind in self.tables)

    @property
    def lookups(self) -> float:
        """Rows that one sample reads."""
        return sum(kind.count * kind.pooling for kind in self.tables)

    def bytes_of(self, kind: Tables) -> float:
        """Bytes of one table and its optimizer state."""
        return kind.rows * (kind.dim * self.width + STATE_BYTES)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The arrangement of the devices."""

    group: int
    """Devices that share one copy of the tables."""
    sync_every: int
    """Steps between two averages over the replicas."""
    contiguous_replicas: bool = True
    """Replicas are neighbours in rank, and a group is spread over the cluster; else the other way round."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The placement of tables on the devices of a group."""

    cost: float
    """Lookups of the busiest device over the mean."""
    bytes: float
    """The fullest device's share over the mean."""
    vectors: int
    """Numbers sent for a sample: a table that is cut by rows gives a partial sum from each piece."""
    ids: float
    """Ids sent for a sample: every column piece needs them."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One device and step. Bytes and seconds."""

    sharding: Sharding
    replicas: int
    memory: dict[str, float]
    """tables, dense, activations; `total` adds them up."""
    seconds: dict[str, float]
    """dense, lookups, imbalance, exchange, reduce, sync: the parts of a step; the sync's share of one."""
    traffic: dict[str, float]
    """Bytes a device sends in a step: ids, vectors (forward and gradients), dense gradients; and in one sync."""
    placement: Placement

    @property
    def total_memory(self) -> float:
        return sum(self.memory.values())

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def efficiency(self) -> float:
        """Share of the step in which devices compute what they must."""
        return (self.seconds["dense"] + self.seconds["lookups"]) / self.step


class ShardingError(TorchwrightError):
    """Groups that the cluster cannot be divided into."""


def estimate(model: RecommenderJob, cluster: Cluster, sharding: Sharding) -> Estimate:
    """Memory, traffic and time of one sharding; raises `ShardingError` where groups do not divide the devices."""
    group, device = sharding.group, cluster.device
    if cluster.devices % group:
        raise ShardingError(
            f"groups of {group} devices", found=f"{cluster.devices} devices", next="use a divisor of them"
        )
    replicas = cluster.devices // group
    sharing, copies = _groups(group, replicas, sharding.contiguous_replicas)
    placed = place(model, group)
    bandwidth = device.memory_bandwidth * device.memory_efficiency
    rate = device.flops[model.compute] * device.matmul_efficiency

    vectors = model.samples * placed.vectors * model.width
    rows = model.samples * sum(kind.count * kind.pooling * kind.dim * model.width for kind in model.tables)
    ids = model.samples * placed.ids * ID_BYTES
    # Forward reads each row; backward reads and writes it, and its state, with the fused optimizer.
    lookups = (3 * rows + 2 * STATE_BYTES * model.samples * model.lookups) / bandwidth
    dense = 6 * model.dense_parameters * model.samples / rate
    gradients = model.width * model.dense_parameters
    everyone = RankGroup(axes=((cluster.devices, 1),))
    shard = model.table_bytes / group * placed.bytes
    sync = cluster.all_reduce(copies, shard) if replicas > 1 else 0.0
    # The next batch's ids travel during the computation; the step waits for vectors and their gradients.
    exchange = 2 * cluster.all_to_all(sharing, vectors) if group > 1 else 0.0
    return Estimate(
        sharding=sharding,
        replicas=replicas,
        memory={
            "tables": shard,
            "dense": 16.0 * model.dense_parameters,
            "activations": 4 * vectors + 2 * ids,
        },
        seconds={
            "dense": dense,
            "lookups": lookups,
            "imbalance": lookups * (placed.cost - 1),
            "exchange": exchange,
            "reduce": max(0.0, cluster.all_reduce(everyone, gradients) - dense * 2 / 3),
            "sync": sync / sharding.sync_every,
        },
        traffic={
            "ids": ids * (group - 1) / group,
            "vectors": 2 * vectors * (group - 1) / group,
            "dense gradients": 2 * gradients * (cluster.devices - 1) / cluster.devices,
            "one sync": 2 * shard * (replicas - 1) / replicas,
        },
        placement=placed,
    )


def estimates(model: RecommenderJob, cluster: Cluster, sync_every: Sequence[int]) -> Iterator[Estimate]:
    """Every group size, both arrangements, and every interval; whether they fit or not."""
    for group in divisors(cluster.devices):
        for every in sync_every if group < cluster.devices else sync_every[:1]:
            for contiguous in (True, False) if 1 < group < cluster.devices else (True,):
                yield estimate(
                    model,
                    cluster,
                    Sharding(group=group, sync_every=every, contiguous_replicas=contiguous),
                )


def place(model: RecommenderJob, group: int) -> Placement:
    """The tables' pieces on `group` devices, the largest first, each where cost and bytes are the least so far."""
    total_cost = sum(kind.count * kind.pooling * kind.dim for kind in model.tables)
    fair_bytes, fair_cost = model.table_bytes / group, total_cost / group
    pieces: list[tuple[float, float]] = []
    vectors, ids = 0, 0.0
    for kind in model.tables:
        size, cost = model.bytes_of(kind), kind.pooling * kind.dim
        parts = math.ceil(max(size / fair_bytes, cost / fair_cost) - 1e-9)
        columns = max(1, min(parts, kind.dim // NARROWEST))
        rows = max(1, math.ceil(parts / columns))
        pieces += [(cost / (rows * columns), size / (rows * columns))] * (kind.count * rows * columns)
        vectors += kind.count * rows * kind.dim
        ids += kind.count * columns * kind.pooling
    shares = sorted(
        ((cost / fair_cost, size / fair_bytes) for cost, size in pieces),
        key=lambda share: (max(share), share),
        reverse=True,
    )
    devices = [(0.0, index, 0.0, 0.0) for index in range(group)]
    for cost, size in shares:
        _, index, costs, sizes = heapq.heappop(devices)
        costs, sizes = costs + cost, sizes + size
        heapq.heappush(devices, (max(costs, sizes), index, costs, sizes))
    return Placement(
        cost=max(cost for _, _, cost, _ in devices),
        bytes=max(size for _, _, _, size in devices),
        vectors=vectors,
        ids=ids,
    )


def _groups(group: int, replicas: int, contiguous_replicas: bool) -> tuple[RankGroup, RankGroup]:
    """The ranks that share one copy, and those that hold the same shard."""
    if contiguous_replicas:
        return RankGroup(axes=((group, replicas),)), RankGroup(axes=((replicas, 1),))
    return RankGroup(axes=((group, 1),)), RankGroup(axes=((replicas, group),))
