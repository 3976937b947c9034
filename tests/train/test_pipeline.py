"""Pipeline stages: every schedule trains to what one process does, resumes bit for bit, and writes the whole model.

The slow reference is the same run on one process.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import BUNDLED, CONFIG, MIXTURE, assert_same, checkpoints, make_run, run_processes
from safetensors.torch import load_file

from torchwright.train.layout import Layout, LayoutError, cut
from torchwright.train.parallel.apply import check_fits
from torchwright.train.parallel.pipeline import owners
from torchwright.train.planning.job import LayoutPlan
from torchwright.train.prove import prove_file
from torchwright.train.prove.proof import read_model
from torchwright.train.run.config.read import parse_run, read_run
from torchwright.train.run.loop.train import train
from torchwright.train.run.observe.metrics import read_figures

FOUR_LAYERS = CONFIG | {"tie_word_embeddings": False, "num_hidden_layers": 4}
HELD_OUT = {"train": ["a.npy", "b.npy"], "validation": ["held.npy"]}


def pipelined(folder: Path, config: dict[str, Any] = FOUR_LAYERS, **changes: Any) -> Path:
    """A run file that measures held-out loss."""
    whole: dict[str, Any] = {"model": {"config": config}, "data": HELD_OUT, "evaluation": {"tokens": 256}}
    return make_run(folder, **(whole | changes))


def finished(run: Path, world: int, *, resume: bool = False) -> Path:
    for code, told in run_processes(run, world=world, resume=resume):
        assert code == 0, told
    return run


def assert_near(one: Path, other: Path) -> None:
    """Every step's loss and gradient norm, the held-out loss and the written model: float32 in another order, 1e-5."""
    left, right = (read_figures(run.parent / "out") for run in (one, other))
    for step, figures in left.items():
        for name in {"loss", "grad_norm", "validation_loss"} & figures.keys():
            assert right[step][name] == pytest.approx(figures[name], rel=1e-5), (step, name)
    ours, theirs = (load_file(run.parent / "out" / "model" / "model.safetensors") for run in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, atol=3e-5, rtol=0, msg=name)


def test_two_stages_train_to_the_same_model_as_one_process(tmp_path: Path) -> None:
    alone = pipelined(tmp_path / "alone")
    train(alone, live=False)
    assert_near(alone, finished(pipelined(tmp_path / "two", layout={"pp": 2}), 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "layout", "more"),
    [
        pytest.param("gpipe", {"pp": 4}, {"micro_batches": 4}, id="gpipe"),
        pytest.param("1f1b", {"pp": 2, "dp_shard": 2}, {}, id="1f1b with FSDP"),
        pytest.param("interleaved", {"pp": 2, "dp_replicate": 2}, {}, id="interleaved with replicas"),
        pytest.param("zero_bubble", {"pp": 2, "dp_shard": 2}, {}, id="zero bubble with FSDP"),
        pytest.param("zbv", {"pp": 2}, {}, id="zero bubble in a V"),
        pytest.param("interleaved", {"pp": 2, "tp": 2}, {}, id="interleaved with tensor parallelism"),
        pytest.param(
            "1f1b",
            {"pp": 2, "dp_shard": 2},
            {"model": {"config": FOUR_LAYERS | MIXTURE}, "recompute": "full"},
            id="experts computed again",
        ),
        pytest.param(
            "zero_bubble",
            {"pp": 2, "dp_shard": 2, "ep": 2},
            {
                "model": {"config": FOUR_LAYERS | MIXTURE},
                "experts": {"balance": "bias", "bias_rate": 0.02},
                "optimizer": {"lr": 3e-3, "eps": 1e-4},
            },
            id="experts over the processes of a stage",
        ),
    ],
)
def test_every_schedule_trains_to_the_same_model_and_resumes_bit_for_bit(
    tmp_path: Path, schedule: str, layout: dict[str, int], more: dict[str, Any]
) -> None:
    world = Layout.from_degrees(layout).processes
    alone = pipelined(tmp_path / "alone", **more)
    train(alone, live=False)
    changes = {
        "layout": layout,
        "pipeline": {"schedule": schedule},
        "checkpoint": {"every_steps": 2, "keep": 9},
    }
    run = finished(pipelined(tmp_path / "run", **(more | changes)), world)
    assert_near(alone, run)
    shutil.copytree(run.parent, tmp_path / "again")
    again = tmp_path / "again" / "run.toml"
    for later in checkpoints(again)[2:]:
        shutil.rmtree(later)
    shutil.rmtree(tmp_path / "again" / "out" / "model")
    finished(again, world, resume=True)
    for name in (path.name for path in checkpoints(run)[-1].glob("*.safetensors")):
        assert_same(load_file(checkpoints(again)[-1] / name), load_file(checkpoints(run)[-1] / name))


@pytest.mark.slow
def test_stages_write_the_texts_that_one_process_writes_and_their_checkpoint_goes_on_without_them(
    tmp_path: Path,
) -> None:
    changes: dict[str, Any] = {
        "model": {"config": FOUR_LAYERS | {"vocab_size": 4096}, "tokenizer": str(BUNDLED)},
        "data": {"train": [str(BUNDLED / "calibration.txt")]},
        "evaluation": {"prompts": ["The module"], "sample_tokens": 4},
    }
    alone = make_run(tmp_path / "alone", **changes)
    train(alone, live=False)
    stages = {"layout": {"pp": 2}, "pipeline": {"schedule": "interleaved"}}
    two = finished(make_run(tmp_path / "two", **changes, **stages), 2)
    assert "sample" in (two.parent / "out" / "metrics.jsonl").read_text()
    wanted, found = (
        [
            line
            for line in (run.parent / "out" / "metrics.jsonl").read_text().splitlines()
            if '"sample"' in line
        ]
        for run in (alone, two)
    )
    assert wanted == found
    # The last checkpoint of two stages, four steps, goes on in one process.
    for later in checkpoints(two)[1:]:
        shutil.rmtree(later)
    shutil.rmtree(two.parent / "out" / "model")
    make_run(two.parent, **changes)
    train(two, resume=True, live=False)
    assert_near(alone, two)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layout": {}, "pipeline": {"schedule": "zbv"}}, "the layout has none"),
        ({"pipeline": {"pieces": 2}}, "'1f1b' has 1 stages a process"),
        (
            {"pipeline": {"schedule": "interleaved", "pieces": 1}},
            "'interleaved' has 2 stages a process or more",
        ),
        ({"micro_batches": 1}, "micro_batches=1 do not keep pp=2 stages busy"),
        (
            {"micro_batches": 5, "pipeline": {"schedule": "zero_bubble"}, "batch_tokens": 320},
            "micro_batches=5 do not keep pp=2",
        ),
        ({"compile": True, "pipeline": {"schedule": "zero_bubble"}}, "do not go with this `compile`"),
        ({"recompute": "full", "pipeline": {"schedule": "zbv"}}, "do not go with this `recompute`"),
        ({"qat": {"scheme": "w8a8"}}, "do not go with this `qat`"),
    ],
)
def test_what_a_pipeline_does_not_go_with_is_refused_in_words(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = pipelined(tmp_path, **({"layout": {"pp": 2}} | changes))
    with pytest.raises(LayoutError, match=said):
        read_run(path)


def test_a_model_without_enough_layers_or_with_one_table_for_both_ends_is_refused(tmp_path: Path) -> None:
    run = read_run(pipelined(tmp_path, layout={"pp": 2}, pipeline={"schedule": "interleaved", "pieces": 3}))
    with pytest.raises(LayoutError, match="4 layers for 6 stages"):
        check_fits(read_model(run, tmp_path), run.parallel, run.pipeline.stages)
    tied = parse_run(run.model_dump(mode="json") | {"model": {"config": CONFIG}})
    with pytest.raises(LayoutError, match="output layer is its embedding"):
        check_fits(read_model(tied, tmp_path), tied.parallel)


def test_layers_are_cut_evenly_and_stages_go_round_or_there_and_back() -> None:
    assert cut(7, 3) == [range(2), range(2, 4), range(4, 7)]
    assert owners("interleaved", 2, 2) == [0, 1, 0, 1]
    assert owners("zbv", 3, 2) == [0, 1, 2, 2, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("zbv", {"pp": 2}),
        ("interleaved", {"pp": 2, "cp": 2}),
        ("zero_bubble", {"pp": 2, "tp": 2}),
        ("1f1b", {"pp": 2, "dp_shard": 2, "ep": 2}),
        ("zbv", {"pp": 2, "cp": 2, "ep": 2}),
    ],
)
def test_stages_are_proved_value_by_value(tmp_path: Path, schedule: str, layout: dict[str, int]) -> None:
    config = FOUR_LAYERS | (MIXTURE if "ep" in layout else {})
    path = pipelined(tmp_path, config, layout=layout, pipeline={"schedule": schedule}, precision="bf16")
    proof = prove_file(path)
    assert proof.passed, proof.divergence
    assert [part.layout for part in proof.parts] == [Layout.from_degrees(layout)]


@pytest.mark.parametrize(
    ("schedule", "pp", "pieces", "micro_batches"),
    [
        ("1f1b", 2, 1, 2),
        ("1f1b", 4, 1, 6),
        ("interleaved", 2, 2, 4),
        ("interleaved", 4, 2, 8),
        ("interleaved", 4, 3, 4),
    ],
)
def test_the_planner_counts_the_bubble_that_the_schedule_leaves(
    schedule: str, pp: int, pieces: int, micro_batches: int
) -> None:
    """PyTorch's own order, timed with a forward pass of 1/3 and a backward pass of 2/3 of a micro-batch."""
    orders = order_of(schedule, pp, pieces, micro_batches)
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * pp
    for _ in range(sum(map(len, orders.values()))):
        for rank, order in orders.items():
            if not order:
                continue
            kind, stage, micro_batch = order[0]
            before = (kind, stage + (1 if kind == "B" else -1), micro_batch)
            if kind == "B" and stage == pp * pieces - 1:
                before = ("F", stage, micro_batch)
            if before in ends or (kind == "F" and stage == 0):
                free[rank] = max(free[rank], ends.get(before, 0.0)) + (1 if kind == "F" else 2) / 3 / pieces
                ends[order.pop(0)] = free[rank]
    assert not any(orders.values())
    plan = LayoutPlan(
        layout=Layout(pp=pp), micro_batch=1, micro_batches=micro_batches, recompute="none", interleave=pieces
    )
    assert max(free) - micro_batches == pytest.approx(plan.bubble)


def order_of(
    schedule: str, pp: int, pieces: int, micro_batches: int
) -> dict[int, list[tuple[str, int, int]]]:
    """Process → (F or B, stage, micro-batch) of its computations, in order."""
    if schedule == "1f1b":  # PyTorch runs it without writing it down
        orders = {}
        for rank in range(pp):
            ahead = pp - rank
            turns = [("F", rank, n) for n in range(ahead)]
            for n in range(micro_batches):
                turns += [("B", rank, n), ("F", rank, n + ahead)]
            orders[rank] = [turn for turn in turns if turn[2] < micro_batches]
        return orders
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    stages: list[Any] = [
        SimpleNamespace(num_stages=pp * pieces, group_size=pp, group_rank=0, stage_index=pp * piece)
        for piece in range(pieces)
    ]
    known = ScheduleInterleaved1F1B(stages, micro_batches).pipeline_order
    return {
        rank: [(a.computation_type.value, a.stage_index, a.microbatch_index or 0) for a in order if a]
        for rank, order in known.items()
    }
