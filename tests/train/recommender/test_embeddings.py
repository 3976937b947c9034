"""Sharded embeddings against dense tables with torch's own optimizers: in one process, and cut over four."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from torchwright.train.recommender.embeddings import (
    SGD,
    Adam,
    EmbeddingError,
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

TABLES = [
    Table(name="items", rows=50, dim=12, features=("clicked", "shown")),
    Table(name="users", rows=33, dim=8, features=("user",), pooling="mean"),
    Table(name="words", rows=20, dim=6, features=("query",), pooling="none"),
]
CUTS: dict[str, list[list[list[int]]]] = {
    "table": [[[0]], [[2]], [[1]]],
    "row": [[[0, 1, 2, 3]], [[3, 1]], [[2, 2, 0]]],
    "column": [[[0], [1], [2]], [[3], [3]], [[1], [0]]],
    "grid": [[[0, 1], [2, 3]], [[1, 0, 2], [3]], [[0, 1], [1, 2]]],
}
"""Owners of each table's parts; with the first, the fourth process holds nothing."""


def a_plan(how: str, processes: int) -> ShardPlan:
    owners = [[[owner % processes for owner in row] for row in rows] for rows in CUTS[how]]
    shards = [shard for table, rows in zip(TABLES, owners, strict=True) for shard in cut(table, rows)]
    return ShardPlan(processes=processes, shards=tuple(shards))


def whole_plan() -> ShardPlan:
    return a_plan("table", 1)


def batch(step: int, process: int, bags: int | None = None) -> dict[str, Jagged]:
    """One process's inputs: bags of 0 to 4 ids; some processes have fewer bags of one feature than of another."""
    generator = torch.Generator().manual_seed(97 * step + process)
    inputs = {}
    for table in TABLES:
        for place, feature in enumerate(table.features):
            count = bags if bags is not None else 3 + (process + place) % 3
            lengths = torch.randint(0, 5, (count,), generator=generator)
            ids = torch.randint(0, table.rows, (int(lengths.sum()),), generator=generator)
            inputs[feature] = Jagged(ids, lengths)
    return inputs


def loss_of(out: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss whose gradient is different for every element."""
    return sum(
        ((x.cumsum(0).tanh() * torch.arange(1, x.shape[1] + 1)).sum() for x in out.values()),
        torch.tensor(0.0),
    )


def dense_out(weights: dict[str, torch.Tensor], inputs: dict[str, Jagged]) -> dict[str, torch.Tensor]:
    """The slow way: every id's row, then the bags, one after another."""
    out = {}
    for table in TABLES:
        for feature in table.features:
            rows = weights[table.name][inputs[feature].ids]
            if table.pooling != "none":
                parts = rows.split(inputs[feature].lengths.tolist())
                reduce = torch.sum if table.pooling == "sum" else torch.mean
                empty = rows.new_zeros(table.dim)
                rows = torch.stack([reduce(part, 0) if len(part) else empty for part in parts])
            out[feature] = rows
    return out


def dense(steps: int, processes: int, step: Any, bags: int | None = None) -> dict[str, torch.Tensor]:
    """Tables after `steps` of the mean over all processes' losses."""
    start = ShardedEmbeddings(TABLES, whole_plan(), SGD(0.1), seed=3, dtype=torch.float64)
    weights = {
        name: tensor.clone().requires_grad_()
        for name, tensor in zip(
            ("items", "users", "words"),
            (tensor for name, tensor in start.named_tensors() if name.endswith("weight")),
            strict=True,
        )
    }
    optimizer = step(list(weights.values()))
    for number in range(steps):
        losses = [loss_of(dense_out(weights, batch(number, process, bags))) for process in range(processes)]
        optimizer.zero_grad()
        (sum(losses, torch.tensor(0.0)) / processes).backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-7)


def test_looks_up_as_dense_tables_do() -> None:
    embeddings = ShardedEmbeddings(TABLES, whole_plan(), SGD(0.1), seed=3, dtype=torch.float64)
    weights = {name: embeddings.full(name).double() for name in embeddings.tables}
    inputs = batch(0, 0)
    wanted = dense_out(weights, inputs)
    for feature, found in embeddings(inputs).items():
        close(found, wanted[feature])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)), (Adam(0.01), lambda p: torch.optim.Adam(p, 0.01))],
)
def test_updates_as_torch_does(ours: Any, theirs: Any) -> None:
    """Two features of one table in one step count once. Adam: as long as every row is looked up, lazy is dense."""
    bags = 200 if isinstance(ours, Adam) else None
    embeddings = ShardedEmbeddings(TABLES, whole_plan(), ours, seed=3, dtype=torch.float64)
    for number in range(3):
        loss_of(embeddings(batch(number, 0, bags))).backward()
    for name, wanted in dense(3, 1, theirs, bags).items():
        close(embeddings.full(name), wanted)


def test_row_wise_adagrad_steps_by_each_rows_own_scale() -> None:
    table = Table(name="t", rows=6, dim=4, features=("f",))
    plan_ = ShardPlan(processes=1, shards=tuple(cut(table, [[0]])))
    embeddings = ShardedEmbeddings([table], plan_, RowWiseAdagrad(0.5, eps=0.0), dtype=torch.float64)
    before, factor = embeddings.full("t"), torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    squares = 0.0
    expected = before[2].double()
    for times in (1.0, 3.0):
        (embeddings({"f": Jagged.of([[2, 2]])})["f"] * factor * times).sum().backward()
        gradient = 2 * factor * times  # the row is looked up twice
        squares += float(gradient.square().mean())
        expected = expected - 0.5 * gradient / squares**0.5
    after = embeddings.full("t")
    torch.testing.assert_close(after[2].double(), expected)
    untouched = [0, 1, 3, 4, 5]
    assert torch.equal(after[untouched], before[untouched])


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(1e-3), Adam(1e-3)])
def test_bfloat16_rows_keep_a_wide_state(optimizer: Any) -> None:
    """In bfloat16 a count stops at 256, and so do a sum of squares of one and a row's sum over 600 bags."""
    table = Table(name="t", rows=2, dim=4, features=("f",))
    plan_ = ShardPlan(processes=1, shards=tuple(cut(table, [[0]])))
    embeddings = ShardedEmbeddings([table], plan_, optimizer, dtype=torch.bfloat16)
    for _ in range(300):
        embeddings({"f": Jagged.of([[1]])})["f"].sum().backward()
    state = dict(embeddings.named_tensors())
    assert all(
        tensor.dtype == (torch.bfloat16 if name.endswith("weight") else torch.float32)
        for name, tensor in state.items()
    )
    if isinstance(optimizer, Adam):
        assert state["t[0:2,0:4].steps"] == 300
        return
    assert state["t[0:2,0:4].squares"].tolist() == [0.0, 300.0]
    embeddings({"f": Jagged.of([[1]] * 600)})["f"].sum().backward()
    assert state["t[0:2,0:4].squares"].tolist() == [0.0, 300.0 + 600.0**2]


def test_drift_is_reduced_where_the_tables_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes no CPU tensors. The meta device stands for a card; only reading the answer fails there."""
    devices: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: devices.append(tensor.device.type))
    groups: Any = SimpleNamespace(topology=Topology(world=1), place=0, sharding=None, replicas=None)
    embeddings = ShardedEmbeddings(TABLES, whole_plan(), SGD(0.1), groups=groups, device=torch.device("meta"))
    with pytest.raises(RuntimeError, match="meta tensors"):
        embeddings.drift()
    assert devices == ["meta"] * 4


def test_bad_inputs_are_refused_by_name() -> None:
    embeddings = ShardedEmbeddings(TABLES, whole_plan(), SGD(0.1))
    good = batch(0, 0)
    for changed, words in (
        ({"user": Jagged.of([[33]])}, "'user' has the id 33. Allowed: 0 to 32"),
        ({"user": Jagged.of([[0, -1]])}, "the id -1"),
        ({"user": Jagged(torch.tensor([1]), torch.tensor([2]))}, "hold 2 ids"),
        ({"user": Jagged(torch.tensor([1.0]), torch.tensor([1]))}, "int64"),
        ({"user": Jagged(torch.tensor([1]), torch.tensor([2, -1]))}, "the length -1"),
        ({"age": Jagged.of([[1]])}, "unknown: age"),
    ):
        with pytest.raises(EmbeddingError, match=words):
            embeddings({**good, **changed})
    with pytest.raises(EmbeddingError, match="missing: clicked"):
        embeddings({feature: bag for feature, bag in good.items() if feature != "clicked"})


def test_tables_and_plans_that_do_not_fit_are_refused() -> None:
    with pytest.raises(EmbeddingError, match="two tables have the feature 'user'"):
        ShardPlan(processes=1, shards=()).check(
            [TABLES[1], Table(name="u", rows=1, dim=1, features=("user",))]
        )
    shards = a_plan("grid", 4).shards
    for changed in (shards[1:], (*shards, shards[0])):
        with pytest.raises(EmbeddingError, match="do not cover the table 'items' once"):
            ShardPlan(processes=4, shards=changed).check(TABLES)
    with pytest.raises(EmbeddingError, match="to process 3"):
        ShardPlan(processes=3, shards=shards).check(TABLES)
    with pytest.raises(EmbeddingError, match="cannot be cut so"):
        cut(TABLES[2], [[0]] * 7)
    with pytest.raises(EmbeddingError, match="4 processes cannot be 3 groups"):
        Topology(world=4, groups=3)


def test_groups_and_replicas() -> None:
    spread = Topology(world=6, groups=2)
    assert spread.sharding_groups() == [[0, 2, 4], [1, 3, 5]]
    assert spread.replica_groups() == [[0, 1], [2, 3], [4, 5]]
    flipped = Topology(world=6, groups=2, flipped=True)
    assert flipped.sharding_groups() == [[0, 1, 2], [3, 4, 5]]
    assert flipped.replica_groups() == [[0, 3], [1, 4], [2, 5]]


def test_the_planner_balances_what_was_measured() -> None:
    tables = [Table(name=str(i), rows=1000, dim=64, features=(f"f{i}",)) for i in range(9)]
    seconds = {str(i): 1.0 + i for i in range(9)}
    found = plan(tables, 4, seconds)
    found.check(tables)
    assert sum(found.seconds) == pytest.approx(45)
    assert found.imbalance < 1.1


def test_the_planner_cuts_what_one_process_cannot_do_or_hold() -> None:
    wide = Table(name="wide", rows=1000, dim=128, features=("w",))
    tall = Table(name="tall", rows=100_000, dim=16, features=("t",))
    big = Table(name="big", rows=200_000, dim=64, features=("b",))
    found = plan([wide, tall, big], 4, {"wide": 2.0, "tall": 2.0, "big": 0.1}, memory_bytes=32e6)
    found.check([wide, tall, big])
    parts = {
        name: [shard for shard in found.shards if shard.table == name] for name in ("wide", "tall", "big")
    }
    assert len({shard.columns for shard in parts["wide"]}) == 2
    assert {shard.rows for shard in parts["wide"]} == {(0, 1000)}
    assert {shard.columns for shard in parts["tall"]} == {(0, 16)}
    assert len(parts["tall"]) == 2
    assert (len({s.columns for s in parts["big"]}), len({s.rows for s in parts["big"]})) == (2, 2)
    for owner in range(4):
        assert sum(shard.elements for shard in found.of(owner)) * 8 <= 32e6
    with pytest.raises(EmbeddingError, match="fits no process any more"):
        plan([wide, tall, big], 2, {"wide": 2.0, "tall": 2.0, "big": 0.1}, memory_bytes=32e6)


def test_costs_are_measured() -> None:
    inputs = {"few": Jagged.of([[1]] * 4), "many": Jagged.of([list(range(500))] * 200)}
    tables = [Table(name=name, rows=1000, dim=64, features=(name,)) for name in inputs]
    costs = measure(tables, inputs, SGD(0.1))
    assert 0 < costs["few"] < costs["many"]


def four(rank: int, folder: str) -> None:
    """One of four processes: every way to cut, then two groups of replicas."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    try:
        for how in CUTS:
            _same_as_dense(rank, Topology(world=4), how)
        for flipped in (False, True):
            _same_as_dense(rank, Topology(world=4, groups=2, flipped=flipped), "grid")
        _drifts(rank)
    finally:
        dist.destroy_process_group()
    Path(folder, f"done-{rank}").touch()


def _same_as_dense(rank: int, topology: Topology, how: str) -> None:
    """Replicas that take their mean after every step of SGD compute what one process does."""
    groups = Groups.make(topology)
    embeddings = ShardedEmbeddings(
        TABLES, a_plan(how, topology.group_size), SGD(0.1), groups=groups, seed=3, dtype=torch.float64
    )
    for number in range(2):
        loss_of(embeddings(batch(number, rank))).backward()
        embeddings.sync()
    for name, wanted in dense(2, 4, lambda p: torch.optim.SGD(p, 0.1)).items():
        close(embeddings.full(name), wanted)
    assert all(value < 1e-12 for value in embeddings.drift().values())


def _drifts(rank: int) -> None:
    groups = Groups.make(Topology(world=4, groups=2))
    embeddings = ShardedEmbeddings(TABLES, a_plan("row", 2), RowWiseAdagrad(0.1), groups=groups, seed=3)
    for number in range(3):
        loss_of(embeddings(batch(number, rank))).backward()
    apart = embeddings.drift()
    assert all(value > 1e-3 for value in apart.values()), apart
    embeddings.sync()
    assert all(value < 1e-6 for value in embeddings.drift().values())
    squares = {name: value.clone() for name, value in embeddings.named_tensors() if name.endswith("squares")}
    embeddings.sync(state=True)
    changed = [
        not torch.equal(value, squares[name]) for name, value in embeddings.named_tensors() if name in squares
    ]
    assert any(changed) or not changed


@pytest.mark.slow
def test_four_processes(tmp_path: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.spawn(four, (str(tmp_path),), nprocs=4)
    assert len(list(tmp_path.glob("done-*"))) == 4
