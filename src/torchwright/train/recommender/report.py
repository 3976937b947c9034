"""RUN/report.json: how far copies that meet rarely lead from a single one, what the planner foresaw, where time went.

Measured on the run's first steps, done again from the beginning: as the run has it, and with one copy of the tables.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchwright.train.recommender.config import RecommenderRun
from torchwright.train.recommender.embeddings import ShardPlan
from torchwright.train.recommender.layout import even_plan, topology_of
from torchwright.train.recommender.learner import RecommenderLearner
from torchwright.train.recommender.losses import Loss
from torchwright.train.recommender.planned import plan_here
from torchwright.train.recommender.store import RowStream
from torchwright.train.run.runtime.processes import on_first


@dataclass
class Prefix:
    """The first steps of a run, done again."""

    learner: RecommenderLearner
    losses: list[float]
    step_s: float
    """Median, without a meeting of the copies."""
    sync_s: float
    """Seconds of one synchronization; 0 if there is a single copy."""
    apart: dict[str, float]
    """Table → how far its copies were apart before the last meeting (`ShardedEmbeddings.drift`)."""


def run_prefix(
    run: RecommenderRun, plan: ShardPlan, rows: RowStream, loss: Loss, device: str, steps: int
) -> Prefix:
    """Collective. At the end the copies meet."""
    world, rank = dist.get_world_size(), dist.get_rank()
    own, every = run.batch // world, run.embeddings.sync_every
    # The meeting is timed by itself.
    alone = run.model_copy(update={"embeddings": run.embeddings.model_copy(update={"sync_every": steps + 1})})
    learner = RecommenderLearner(alone, topology_of(run.embeddings, world), plan, loss, device)
    losses, seconds, syncs = [], [], [0.0]
    for number in range(steps):
        batch = rows.batch(number * run.batch + rank * own, own, device)
        begun = time.perf_counter()
        losses.append(learner.gradients(batch).loss)
        learner.update(number)
        seconds.append(time.perf_counter() - begun)
        if number == steps - 1:
            apart = learner.tables.drift()
        if (number + 1) % every == 0 or number == steps - 1:
            begun = time.perf_counter()
            learner.tables.sync()
            syncs.append(time.perf_counter() - begun)
    return Prefix(
        learner=learner,
        losses=losses,
        step_s=statistics.median(seconds),
        sync_s=statistics.median(syncs[1:]) if run.embeddings.groups > 1 else 0.0,
        apart=apart,
    )


def make_report(
    run: RecommenderRun, plan: ShardPlan, rows: RowStream, loss: Loss, device: str
) -> dict[str, Any] | None:
    """Drift and plan as plain data, the same on every process; None where no steps are asked for. Collective.

    Until it returns the tables are held twice more.
    """
    steps = min(run.report.drift_steps, run.steps)
    if not steps:
        return None
    ours = run_prefix(run, plan, rows, loss, device, steps)
    report: dict[str, Any] = {"steps": steps, "plan": _beside_plan(run, ours)}
    if run.embeddings.groups > 1:
        single = run.model_copy(update={"embeddings": run.embeddings.model_copy(update={"groups": 1})})
        dense = run_prefix(single, even_plan(run, dist.get_world_size()), rows, loss, device, steps)
        report["drift"] = _drift(run, ours, dense)
    return report


def _drift(run: RecommenderRun, ours: Prefix, single: Prefix) -> dict[str, Any]:
    """Differences of losses in nats; of weights the root mean squared distance over the single copy's own."""

    def distance(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).norm() / other.norm().clamp_min(1e-30))

    apart = [abs(one - other) for one, other in zip(ours.losses, single.losses, strict=True)]
    dense = (
        torch.cat([p.detach().flatten() for p in side.learner.dense.parameters()]) for side in (ours, single)
    )
    tables = {
        name: distance(ours.learner.tables.full(name), single.learner.tables.full(name))
        for name in run.model.columns
    }
    return {
        "loss_mean": statistics.mean(apart),
        "loss_last": apart[-1],
        "dense": distance(*dense),
        "tables_mean": statistics.mean(tables.values()),
        "tables_largest": max(tables.values()),
        "copies_apart": max(ours.apart.values()),
        "single_copy_step_s": single.step_s,
    }


def _beside_plan(run: RecommenderRun, ours: Prefix) -> dict[str, dict[str, float]]:
    """Figure → planned and measured, of the fullest or slowest process."""
    held = sum(t.numel() * t.element_size() for _, t in ours.learner.tables.named_tensors())
    ours_held = torch.tensor([held, ours.step_s, ours.sync_s], dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.all_reduce(ours_held, dist.ReduceOp.MAX)
    bytes_, step_s, sync_s = ours_held.tolist()
    planned = on_first(lambda: plan_here(run, dist.get_world_size()))
    every = run.embeddings.sync_every
    return {
        "tables_bytes": {"planned": planned.memory["tables"], "measured": bytes_},
        "step_s": {"planned": planned.step - planned.seconds["sync"], "measured": step_s},
        "sync_s": {"planned": planned.seconds["sync"] * every, "measured": sync_s},
    }


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report in lines for people."""
    lines = [
        f"{name}: planned {figures['planned']:.3g}, measured {figures['measured']:.3g}"
        for name, figures in report["plan"].items()
    ]
    if "drift" in report:
        drift = report["drift"]
        lines.append(
            f"drift from a single copy after {report['steps']} steps: loss {drift['loss_mean']:.2e} on the mean, "
            f"tables {drift['tables_mean']:.2%} (at most {drift['tables_largest']:.2%}), "
            f"dense layers {drift['dense']:.2%}"
        )
    seconds = ", ".join(f"{name} {spent:.1f}" for name, spent in report["seconds"].items() if spent >= 0.05)
    return [*lines, f"seconds of process 0: {seconds}"]
