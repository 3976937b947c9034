"""Two dimensions of processes: groups that share out the tables, and replicas of every shard across the groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from torchwright.train.recommender.embeddings.tables import EmbeddingError


@dataclass(frozen=True, kw_only=True)
class Topology:
    """`groups` sharding groups over `world` processes.

    Sharding group i is `[i, G+i, 2G+i, …]` for G groups, so that a shard's replicas are contiguous and their averaging
    stays inside a machine; `flipped`, the sharding groups are contiguous instead (Zhang et al., 2025: two-dimensional
    sparse parallelism).
    """

    world: int
    groups: int = 1
    flipped: bool = False

    def __post_init__(self) -> None:
        if self.groups < 1 or self.world % self.groups:
            raise EmbeddingError(
                f"{self.world} processes cannot be {self.groups} groups of equal size",
                allowed=", ".join(str(n) for n in range(1, self.world + 1) if self.world % n == 0),
            )

    @property
    def group_size(self) -> int:
        """Processes that share out one copy of the tables."""
        return self.world // self.groups

    def sharding_groups(self) -> list[list[int]]:
        """The ranks of each sharding group, in the order of their places in it."""
        if self.flipped:
            size = self.group_size
            return [list(range(i * size, (i + 1) * size)) for i in range(self.groups)]
        return [list(range(i, self.world, self.groups)) for i in range(self.groups)]

    def replica_groups(self) -> list[list[int]]:
        """The ranks that hold the same shards, one list for each place in a sharding group."""
        return [list(ranks) for ranks in zip(*self.sharding_groups(), strict=True)]


@dataclass(frozen=True, kw_only=True)
class Groups:
    """One process's place: its sharding group and its replica group, as process groups."""

    topology: Topology
    place: int
    """In the sharding group: which shards are its own."""
    sharding: dist.ProcessGroup
    replicas: dist.ProcessGroup

    @classmethod
    def make(cls, topology: Topology) -> Groups:
        """Every process of the default group must call this. Raises `EmbeddingError` for another number of them."""
        if dist.get_world_size() != topology.world:
            raise EmbeddingError(
                f"the topology is of {topology.world} processes", found=f"{dist.get_world_size()} processes"
            )
        rank = dist.get_rank()
        sharding, _ = dist.new_subgroups_by_enumeration(topology.sharding_groups())
        replicas, _ = dist.new_subgroups_by_enumeration(topology.replica_groups())
        assert isinstance(sharding, dist.ProcessGroup)
        assert isinstance(replicas, dist.ProcessGroup)
        mine = next(ranks for ranks in topology.sharding_groups() if rank in ranks)
        return cls(topology=topology, place=mine.index(rank), sharding=sharding, replicas=replicas)
