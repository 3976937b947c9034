"""A recommender's run on paper: the planner's estimate of its own layout here, and of all others on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from torchwright.train.planning.cluster import Cluster, this_machine
from torchwright.train.planning.recommender import (
    Estimate,
    RecommenderJob,
    Sharding,
    Tables,
    estimate,
    estimates,
)
from torchwright.train.recommender.config import RecommenderRun, read_recommender
from torchwright.train.recommender.models import build_dense

INTERVALS = (1, 8, 64)
"""Steps between two synchronizations to consider, in addition to the run's own."""


def job_of(run: RecommenderRun, devices: int) -> RecommenderJob:
    """The run as the planner takes it, in float32."""
    with torch.device("meta"):
        dense = sum(parameter.numel() for parameter in build_dense(run).parameters())
    return RecommenderJob(
        tables=tuple(
            Tables(count=1, rows=rows, dim=run.model.dim, pooling=1) for rows in run.model.columns.values()
        ),
        dense_parameters=dense,
        samples=max(1, run.batch // devices),
        width=4,
        compute="float32",
    )


def plan_here(run: RecommenderRun, processes: int) -> Estimate:
    """The run's own layout on this machine's processes."""
    cluster = Cluster(device=this_machine(processes), nodes=1, devices_per_node=processes)
    chosen = run.embeddings
    sharding = Sharding(
        group=processes // chosen.groups,
        sync_every=chosen.sync_every,
        contiguous_replicas=not chosen.flipped,
    )
    return estimate(job_of(run, processes), cluster, sharding)


def plan_file(path: Path, cluster: Cluster) -> list[Estimate]:
    """Every layout of a run file on a cluster that fits its devices, the fastest step first."""
    run = read_recommender(path)
    every = sorted({*INTERVALS, run.embeddings.sync_every})
    return sorted(_fitting(run, cluster, every), key=lambda one: one.step)


def _fitting(run: RecommenderRun, cluster: Cluster, every: list[int]) -> Iterator[Estimate]:
    for one in estimates(job_of(run, cluster.devices), cluster, every):
        if one.total_memory <= cluster.device.memory:
            yield one
