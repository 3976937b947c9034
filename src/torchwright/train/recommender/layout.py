"""The layout of a run's tables on its processes: groups, the plan of the shards, and the optimizer of their rows."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchwright.core.json_file import read_json
from torchwright.core.process.files import replacing
from torchwright.train.recommender.config import Embeddings, RecommenderRun
from torchwright.train.recommender.embeddings import (
    SGD,
    Adam,
    Groups,
    Inputs,
    Jagged,
    RowOptimizer,
    RowWiseAdagrad,
    Shard,
    ShardPlan,
    Topology,
    measure,
    plan,
)
from torchwright.train.recommender.models import tables_of
from torchwright.train.recommender.store import ClickBatch
from torchwright.train.run.runtime.processes import on_first


def topology_of(chosen: Embeddings, world: int) -> Topology:
    """Raises `EmbeddingError` for groups that do not divide the processes."""
    return Topology(world=world, groups=chosen.groups, flipped=chosen.flipped)


def make_groups(topology: Topology) -> Groups | None:
    """This process's groups; None for one process. Collective."""
    return Groups.make(topology) if topology.world > 1 else None


def replica_of(topology: Topology, rank: int) -> int:
    """The number of the group, and so of the copy of the tables, that a process belongs to."""
    return next(number for number, ranks in enumerate(topology.sharding_groups()) if rank in ranks)


def row_optimizer(chosen: Embeddings) -> RowOptimizer:
    """Return the optimizer of the tables' rows."""
    return {"rowwise_adagrad": RowWiseAdagrad, "sgd": SGD, "adam": Adam}[chosen.optimizer](chosen.lr)


def look_ups(run: RecommenderRun, batch: ClickBatch) -> Inputs:
    """Each category's ids, one a row."""
    ones_B = batch.categories_BC.new_ones(len(batch))
    columns = batch.categories_BC.unbind(1)
    return {name: Jagged(ids, ones_B) for name, ids in zip(run.model.columns, columns, strict=True)}


def placement(run: RecommenderRun, batch: ClickBatch, out: Path) -> ShardPlan:
    """The plan for a group's processes by the seconds that each table takes for `batch`.

    The first process makes it, and keeps it as RUN/placement-DIGEST.json by what it is for: measured again the seconds
    are others.
    """
    tables, processes = tables_of(run), dist.get_world_size() // run.embeddings.groups
    key = hashlib.sha256(f"{tables} {processes} {run.embeddings.optimizer}".encode()).hexdigest()[:12]

    def made() -> ShardPlan:
        path = out / f"placement-{key}.json"
        if path.is_file():
            return read_plan(read_json(path))
        costs = measure(tables, look_ups(run, batch), row_optimizer(run.embeddings))
        found = plan(tables, processes, costs)
        with replacing(path) as new:
            new.write_text(json.dumps(dataclasses.asdict(found), indent=1), "utf-8")
        return found

    found = on_first(made)
    found.check(tables)
    return found


def even_plan(run: RecommenderRun, processes: int) -> ShardPlan:
    """A plan that depends on nothing but the run: every table costs the same."""
    tables = tables_of(run)
    return plan(tables, processes, {table.name: 1.0 for table in tables})


def read_plan(raw: dict[str, Any]) -> ShardPlan:
    """A plan from plain data."""
    shards = tuple(
        Shard(
            table=str(shard["table"]),
            owner=int(shard["owner"]),
            rows=(int(shard["rows"][0]), int(shard["rows"][1])),
            columns=(int(shard["columns"][0]), int(shard["columns"][1])),
        )
        for shard in raw["shards"]
    )
    return ShardPlan(processes=int(raw["processes"]), shards=shards, seconds=tuple(raw["seconds"]))
