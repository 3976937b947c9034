"""`torchwright prove RUN.toml` of a recommender: check that several processes compute what one computes.

A small model of the run's kind, its tables cut in every way, takes steps of the trainer's own learner on gloo
processes of this machine in float64. Every loss, weight and table after each step is compared with `Reference`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchwright.train.prove.processes import on_processes
from torchwright.train.recommender.config import RecommenderRun, read_recommender
from torchwright.train.recommender.embeddings.planner import ShardPlan, cut

Around = Callable[[], contextlib.AbstractContextManager[Any]]
"""The context in which every process trains, and not the reference; for tests, which seed faults by it."""
PROCESSES, STEPS, ROWS_EACH = 8, 4, 6
TOLERANCE = 1e-9
"""The tolerance in float64: the largest difference over the largest value."""
SMALL = {"rows": 24, "dim": 6, "width": 5, "columns": 6}
ALIKE, ONE = "as the run has it", "one process"
WHY = {
    "loss": "forward: look-ups, their exchange, or the dense layers",
    "dense": "the mean of the dense gradients over the processes",
    "table": "the rows' gradients on their way back, their optimizer, or the copies' mean",
}


@dataclass(frozen=True, kw_only=True)
class TensorComparison:
    """One comparison."""

    against: str
    processes: int
    groups: int
    sync_every: int
    optimizer: str
    error: float
    """The largest of all values', relative."""
    first: str | None
    """The first value that differs by more than `TOLERANCE`."""
    seconds: float

    @property
    def passed(self) -> bool:
        return self.first is None


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Everything that is said."""

    run: str
    parts: tuple[TensorComparison, ...]
    extrapolated: tuple[str, ...]
    """Differences between the run file and the run that stood for it."""

    @property
    def passed(self) -> bool:
        return all(part.passed for part in self.parts)

    @property
    def likely(self) -> str | None:
        """The place to look at if something differs."""
        first = next((part.first for part in self.parts if part.first), None)
        return None if first is None else WHY[first.split(": ")[1].split()[0]]


def prove_file(
    path: Path, processes: int = PROCESSES, announce: Callable[[TensorComparison], None] = lambda part: None
) -> Proof:
    """Prove the run of a run file; its data are not read. Raises as `read_recommender`, and `ProveError`."""
    return prove(str(path), read_recommender(path), processes, announce=announce)


def prove(
    name: str,
    run: RecommenderRun,
    processes: int = PROCESSES,
    around: Around = contextlib.nullcontext,
    announce: Callable[[TensorComparison], None] = lambda part: None,
) -> Proof:
    """Run as the file says against the same groups in one process; and with SGD and a synchronization after every
    step, against one process without groups. `announce` is called for each.
    """
    groups, sync = (
        min(run.embeddings.groups, max(processes // 2, min(processes, 2))),
        min(run.embeddings.sync_every, 2),
    )
    size = min(2 if groups > 1 else 4, processes // groups)
    tables = {"groups": groups, "sync_every": sync}
    small = shrink(run.model_copy(update={"embeddings": run.embeddings.model_copy(update=tables)}))
    plain = {"optimizer": "sgd", "sync_every": 1}
    met = small.model_copy(update={"embeddings": small.embeddings.model_copy(update=plain)})
    parts = []
    for against, one in ((ALIKE, small), (ONE, met)):
        begun = time.perf_counter()
        told = on_processes(groups * size, compare, one, against == ONE, around)
        wrong = [(step, what) for values in told for step, what, error in values if not error <= TOLERANCE]
        parts.append(
            TensorComparison(
                against=against,
                processes=groups * size,
                groups=groups,
                sync_every=one.embeddings.sync_every,
                optimizer=one.embeddings.optimizer,
                error=max(error for values in told for _, _, error in values),
                first=f"step {min(wrong)[0] + 1}: {min(wrong)[1]}" if wrong else None,
                seconds=time.perf_counter() - begun,
            )
        )
        announce(parts[-1])
    said = [
        f"{field}={asked} (ran at {ran})"
        for field, asked, ran in (
            ("groups", run.embeddings.groups, groups),
            ("sync_every", run.embeddings.sync_every, sync),
        )
        if asked != ran
    ]
    return Proof(run=name, parts=tuple(parts), extrapolated=tuple(said))


def shrink(run: RecommenderRun) -> RecommenderRun:
    """The run with few and small tables and narrow layers."""

    def few(columns: dict[str, int]) -> dict[str, int]:
        return {name: min(rows, SMALL["rows"]) for name, rows in list(columns.items())[: SMALL["columns"]]}

    def narrow(widths: list[int]) -> list[int]:
        return [min(width, SMALL["width"]) for width in widths]

    if run.dlrm is not None:
        model, tables = run.dlrm, few(run.dlrm.columns)
        changes = {"top": narrow(model.top), "bottom": narrow(model.bottom), "dim": SMALL["dim"]}
        changes |= {"categories": list(tables), "tables": tables, "numbers": model.numbers[:4]}
        return run.model_copy(update={"dlrm": model.model_copy(update=changes)})
    assert run.two_tower is not None
    model = run.two_tower
    changes = {"user": few(model.user), "item": few(model.item)}
    changes |= {"hidden": narrow(model.hidden), "dim": SMALL["dim"]}
    return run.model_copy(update={"two_tower": model.model_copy(update=changes)})


def every_cut(run: RecommenderRun, processes: int) -> ShardPlan:
    """Tables whole, cut by rows, by columns and by both, in turn."""
    from torchwright.train.recommender.models import tables_of

    shards = []
    for number, table in enumerate(tables_of(run)):
        places = [(number + place) % processes for place in range(processes)]
        half = max(1, processes // 2)
        ways = ([places[:1]], [places], [[place] for place in places], [places[:half], places[-half:]])
        shards += cut(table, ways[number % 4])
    return ShardPlan(processes=processes, shards=tuple(shards))


def compare(run: RecommenderRun, alone: bool, around: Around) -> list[tuple[int, str, float]]:
    """One process: its part of the steps, the reference of all, and (step, value, relative difference) of each value.

    `alone`: the reference knows of no groups.
    """
    import torch
    import torch.distributed as dist

    from torchwright.train.recommender.layout import replica_of, topology_of
    from torchwright.train.recommender.learner import RecommenderLearner
    from torchwright.train.recommender.losses import InBatchLoss, click_loss
    from torchwright.train.recommender.reference import Reference

    rank, world = dist.get_rank(), dist.get_world_size()
    topology = topology_of(run.embeddings, world)
    plan = every_cut(run, topology.group_size)
    log_q_R, loss = torch.zeros(SMALL["rows"], dtype=torch.float64), click_loss
    if run.two_tower is not None:
        log_q_R = torch.linspace(-4, -1, SMALL["rows"], dtype=torch.float64)
        loss = InBatchLoss(run.two_tower.temperature, log_q_R, len(run.two_tower.user))
    learner = RecommenderLearner(run, topology, plan, loss, "cpu", torch.float64)
    tables = {name: learner.tables.full(name).double() for name in run.model.columns}
    cuts = {name: sorted({s.columns for s in plan.shards if s.table == name}) for name in tables}
    lonely = run.model_copy(update={"embeddings": run.embeddings.model_copy(update={"groups": 1})})
    reference = Reference(lonely if alone else run, tables, learner.dense, cuts)
    copies = torch.tensor([0 if alone else replica_of(topology, place) for place in range(world)])
    mine = reference.copies[int(copies[rank])]
    found: list[tuple[int, str, float]] = []
    for number in range(STEPS):
        batch = random_batch(run, number, world * ROWS_EACH)
        with around():
            figures = learner.gradients(part_of(batch, rank))
            learner.update(number)
        wanted = reference.step(number, batch, copies.repeat_interleave(ROWS_EACH), log_q_R)
        found.append((number, "loss", abs(figures.loss - wanted) / abs(wanted)))
        for (name, ours), theirs in zip(
            learner.dense.named_parameters(), reference.dense.parameters(), strict=True
        ):
            found.append((number, f"dense {name}", relative(ours, theirs)))
        for name in tables:
            found.append((number, f"table {name}", relative(learner.tables.full(name), mine.tables[name])))
    return found


def random_batch(run: RecommenderRun, number: int, rows: int) -> Any:
    """The same on every process; some ids come often, and some numbers are missing."""
    import torch

    from torchwright.train.recommender.store import ClickBatch

    generator = torch.Generator().manual_seed(1000 + number)
    numbers = len(run.dlrm.numbers) if run.dlrm else 0
    ids = [
        (torch.rand(rows, generator=generator).square() * size).long() for size in run.model.columns.values()
    ]
    return ClickBatch(
        numbers_BD=torch.randn(rows, numbers, generator=generator, dtype=torch.float64).clamp_min(0),
        categories_BC=torch.stack(ids, dim=1),
        clicked_B=(torch.rand(rows, generator=generator) < 0.4).float(),
    )


def part_of(batch: Any, rank: int) -> Any:
    """A process's rows."""
    rows = slice(rank * ROWS_EACH, (rank + 1) * ROWS_EACH)
    return type(batch)(
        numbers_BD=batch.numbers_BD[rows],
        categories_BC=batch.categories_BC[rows],
        clicked_B=batch.clicked_B[rows],
    )


def relative(ours: Any, theirs: Any) -> float:
    """The largest difference over the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
