"""A recommender over sharded embedding tables: the quality by how rarely replicas take their mean.

    python -m benchmarks.train.embeddings_2d [--steps N] [--processes 4] [--groups 2] [--json FILE]

A DLRM (Naumov et al., 2019: bottom MLP, embeddings, products of all pairs, top MLP) learns generated clicks, whose
chance depends on hidden vectors of user, item and context; ids are Zipf distributed. One process on the whole batch is
compared with two dimensions of processes (gloo) whose replicas synchronise every 1, 8 and 64 steps. Reported are the
area under the ROC curve on held-out clicks, and the largest drift between replicas.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

from benchmarks.harness import run
from benchmarks.harness.run import Row
from torchwright.train.recommender.embeddings import (
    Groups,
    Jagged,
    RowWiseAdagrad,
    ShardedEmbeddings,
    ShardPlan,
    Table,
    Topology,
    cut,
    measure,
    plan,
)

DIM, HIDDEN, DENSE = 16, 8, 8
ROWS = {"user": 20_000, "item": 10_000, "context": 500, "seen": 10_000}
TABLES = [
    Table(name=name, rows=rows, dim=DIM, features=(name,), pooling="mean" if name == "seen" else "sum")
    for name, rows in ROWS.items()
]
BATCH, HELD_OUT = 512, 20_000
EVERY = (1, 8, 64)


class Clicks:
    """Samples whose logit is planted: products of hidden vectors, and a little of the dense features."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.hidden = {
            name: torch.randn(rows, HIDDEN, generator=generator) / HIDDEN**0.5 for name, rows in ROWS.items()
        }
        self.slope = torch.randn(DENSE, generator=generator) * 0.3

    def draw(self, count: int, seed: int) -> tuple[torch.Tensor, dict[str, Jagged], torch.Tensor]:
        """Return dense features (B, DENSE), bags, clicks (B,)."""
        generator = torch.Generator().manual_seed(seed)
        dense = torch.randn(count, DENSE, generator=generator)
        lengths = {name: torch.ones(count, dtype=torch.int64) for name in ROWS}
        lengths["seen"] = torch.randint(0, 8, (count,), generator=generator)
        bags, sums = {}, {}
        for name, rows in ROWS.items():
            share = torch.rand(int(lengths[name].sum()), generator=generator)
            ids = (rows**share - 1).long().clamp_max(rows - 1)  # density ∝ 1 / id
            bags[name] = Jagged(ids, lengths[name])
            sums[name] = torch.zeros(count, HIDDEN).index_add_(0, bags[name].bags(), self.hidden[name][ids])
        seen = sums["seen"] / lengths["seen"].clamp_min(1)[:, None]
        logit = 4 * (sums["user"] * sums["item"]).sum(1) + 2 * (seen * sums["item"]).sum(1)
        logit += 2 * (sums["context"] * sums["user"]).sum(1) + dense @ self.slope - 0.5
        return dense, bags, torch.bernoulli(logit.sigmoid(), generator=generator)


class Recommender(nn.Module):
    """The dense part of DLRM."""

    def __init__(self) -> None:
        super().__init__()
        vectors = len(TABLES) + 1
        self.bottom = nn.Sequential(nn.Linear(DENSE, 32), nn.ReLU(), nn.Linear(32, DIM), nn.ReLU())
        pairs = vectors * (vectors - 1) // 2
        self.top = nn.Sequential(nn.Linear(DIM + pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        self.pairs = torch.triu_indices(vectors, vectors, offset=1)

    def forward(self, dense: torch.Tensor, embedded: dict[str, torch.Tensor]) -> torch.Tensor:
        x_BE = self.bottom(dense)
        all_BVE = torch.stack([x_BE, *embedded.values()], dim=1)
        products_BVV = all_BVE @ all_BVE.transpose(1, 2)
        return self.top(torch.cat([x_BE, products_BVV[:, self.pairs[0], self.pairs[1]]], dim=1))[:, 0]


def auc(score: torch.Tensor, clicked: torch.Tensor) -> float:
    """Return the chance that a clicked sample scores above another one (the rank sum; scores are all different)."""
    rank = score.argsort().argsort().double() + 1
    ones = clicked.sum().double()
    return float((rank[clicked > 0].sum() - ones * (ones + 1) / 2) / (ones * (len(clicked) - ones)))


def train(steps: int, every: int, groups: Groups | None, layout: ShardPlan) -> Row:
    """Train as one process of a run; the batch is divided evenly."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if groups else (0, 1)
    clicks = Clicks()
    torch.manual_seed(0)
    model = Recommender()
    embeddings = ShardedEmbeddings(TABLES, layout, RowWiseAdagrad(0.1), groups=groups, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    drift, begun = 0.0, time.perf_counter()
    for step in range(steps):
        dense, bags, clicked = clicks.draw(BATCH, 1000 + step)
        own = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        loss = F.binary_cross_entropy_with_logits(
            model(dense[own], embeddings({name: part(bag, own) for name, bag in bags.items()})), clicked[own]
        )
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters() if groups else ():
            dist.all_reduce(parameter.grad)
            assert parameter.grad is not None
            parameter.grad /= world
        optimizer.step()
        if (step + 1) % max(EVERY) == 0:
            drift = max(drift, *embeddings.drift().values())
        if (step + 1) % every == 0:
            embeddings.sync()
    seconds = time.perf_counter() - begun
    embeddings.sync()
    dense, bags, clicked = clicks.draw(HELD_OUT, 7)
    with torch.no_grad():
        found = auc(model(dense, embeddings(bags)), clicked)
    return {"auc": found, "drift": drift, "steps_per_s": steps / seconds}


def part(bag: Jagged, samples: slice) -> Jagged:
    """Return some of a feature's bags."""
    ends = bag.lengths.cumsum(0)
    lengths = bag.lengths[samples]
    end = int(ends[samples][-1])
    return Jagged(bag.ids[end - int(lengths.sum()) : end], lengths)


def process(rank: int, port: int, options: argparse.Namespace, layout: ShardPlan, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=options.processes
    )
    groups = Groups.make(Topology(world=options.processes, groups=options.groups))
    rows = [{"every": every, **train(options.steps, every, groups, layout)} for every in EVERY]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    options = run.options(__doc__, steps=3000, processes=4, groups=2)
    rows = run.Rows(options.json)
    whole = ShardPlan(processes=1, shards=tuple(shard for table in TABLES for shard in cut(table, [[0]])))
    found = [{"contender": "one process", **train(options.steps, 1, None, whole)}]
    costs = measure(TABLES, Clicks().draw(BATCH, 0)[1], RowWiseAdagrad(0.1))
    layout = plan(TABLES, options.processes // options.groups, costs)
    print(f"measured: {', '.join(f'{name} {1e3 * cost:.2f} ms' for name, cost in costs.items())}; ", end="")
    print(f"{len(layout.shards)} shards, the busiest process at {layout.imbalance:.2f} of the mean\n")
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        spawn(process, (port, options, layout, folder), nprocs=options.processes)
        two = json.loads(Path(folder, "rows.json").read_text())
    found += [{"contender": f"{options.groups} groups, sync every {row['every']}", **row} for row in two]
    run.head(("contender", "AUC", "to one process", "largest drift", "steps/s"))
    for row in found:
        auc, change = f"{row['auc']:.4f}", f"{row['auc'] - found[0]['auc']:+.4f}"
        speed = f"{row['steps_per_s']:.0f}"
        rows.add(row, (row["contender"], auc, change, f"{row['drift']:.1%}", speed))


if __name__ == "__main__":
    main()
