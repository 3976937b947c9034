"""`gather = "float8"`: what travels, what it costs in exactness, who is refused, and what the planner counts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from runs import CONFIG, checkpoints, losses, make_run, run_processes
from safetensors.torch import load_file

from torchwright.cli import main
from torchwright.core.quiet import quiet_import
from torchwright.models.decoder.families import decoder_config
from torchwright.train.layout import Layout
from torchwright.train.planning.cluster import Cluster, read_device
from torchwright.train.planning.job import Job, JobError, LayoutPlan
from torchwright.train.planning.memory import peak_memory
from torchwright.train.planning.models import read_model
from torchwright.train.planning.time import Clock
from torchwright.train.planning.traffic import traffic
from torchwright.train.prove.processes import on_processes
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.read import parse_run, read_run
from torchwright.train.run.config.run import Run
from torchwright.train.run.objectives.rowwise import LOST, round_rows
from torchwright.train.run.objectives.setup import build_model
from torchwright.train.shape import Shape

FLOAT8 = {"precision": "float8_tensorwise", "layout": {"dp_shard": 2}}
ROWS = 64 + 2 * 32 + 64 + 2 * 96 + 64
"""Rows in all matrices of one layer of `CONFIG`, together."""
BIASED = CONFIG | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float8_tensorwise", "float8_rowwise"])
def test_losses_stay_near_and_a_run_that_goes_on_has_the_same_bits(precision: str, tmp_path: Path) -> None:
    """Beside the run that gathers in bfloat16, losses stay within 0.3%: weights are rounded once and not twice."""
    keep = {"every_steps": 3, "keep": 9}
    runs = [
        make_run(tmp_path / name, **FLOAT8 | {"precision": precision}, checkpoint=keep, **changes)
        for name, changes in (("plain", {}), ("gathered", {"gather": "float8"}))
    ]
    for run in runs:
        for code, told in run_processes(run, world=2):
            assert code == 0, told
    plain, gathered = map(losses, runs)
    assert list(gathered.values()) == pytest.approx(list(plain.values()), rel=3e-3)
    assert gathered != plain

    again = tmp_path / "again"
    shutil.copytree(runs[1].parent, again)
    shutil.rmtree(checkpoints(again / "run.toml")[-1])
    shutil.rmtree(again / "out" / "model")
    for code, told in run_processes(again / "run.toml", world=2, resume=True):
        assert code == 0, told
    ours, theirs = (
        load_file(run.parent / "out/model/model.safetensors") for run in (again / "run.toml", runs[1])
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def messages(run: Run, config: dict[str, Any]) -> list[int]:
    """Bytes that this process puts into each all-gather of a forward pass."""
    sent: list[int] = []
    # torch 2.13 has a new name for what FSDP calls.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather = getattr(dist, name)

    def counting(*tensors: Any, **options: Any) -> Any:
        sent.append(
            (options.get("input_tensor", options.get("input")) if len(tensors) < 2 else tensors[1]).nbytes
        )
        return gather(*tensors, **options)

    model, _ = build_model(run, decoder_config(config, "the test"), Path(), "cpu")
    with patch.object(dist, name, counting), torch.autocast("cpu", torch.bfloat16):
        model.loss(torch.ones(1, 8, dtype=torch.long), torch.ones(1, 8, dtype=torch.long))  # type: ignore[operator]
    return sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "gather", "matrix", "row"),
    [
        ("float8_tensorwise", None, 2, 0),
        ("float8_tensorwise", "float8", 1, 0),
        ("float8_rowwise", "float8", 1, 1),
    ],
)
def test_the_planner_counts_the_bytes_that_travel(
    precision: str, gather: str | None, matrix: int, row: int
) -> None:
    """A layer's message is what the planner says: 8 bits for a matrix, 16 for norms and biases; 8 more for a row."""
    shape = Shape(decoder_config(BIASED, "the test"))
    (kind,) = set(shape.kinds)
    layer = shape.layer(kind)
    assert layer.biases == 64 + 2 * 32
    values = {"out": "", "tokens": 1, "batch_tokens": 1, "context": 1, "data": {"train": [""]}}
    run = parse_run(values | FLOAT8 | {"model": {"config": {}}, "gather": gather, "precision": precision})
    (sent, _) = on_processes(2, messages, run, BIASED)
    bytes_of_layer = matrix * (layer.total - layer.biases - layer.replicated)
    bytes_of_layer += 2 * (layer.biases + layer.replicated) + row * ROWS
    # Padded to whole rows for each process: none here.
    assert sent.count(bytes_of_layer // 2) == len(shape.kinds)


def narrow_and_wide(seed: int = 0) -> torch.Tensor:
    """A matrix whose rows and columns have largest numbers of very different sizes."""
    draw = torch.Generator().manual_seed(seed)
    matrix_NK = torch.randn(96, 64, generator=draw)
    return matrix_NK * 10 ** torch.randn(96, 1, generator=draw) * 10 ** torch.randn(64, generator=draw)


def rounded(matrix_NK: torch.Tensor, dim: int) -> torch.Tensor:
    """The numbers that torchao's rowwise recipe computes with; `dim` -1 is by rows, 0 by columns."""
    with quiet_import():
        from torchao.float8.config import ScalingGranularity, e4m3_dtype
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import LinearMMConfig

    found = hp_tensor_to_float8_dynamic(
        matrix_NK,
        e4m3_dtype,
        LinearMMConfig(),
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=dim,
        round_scales_to_power_of_2=True,
    )
    return found.to_original_precision()


def as_gathered(matrix_NK: torch.Tensor) -> torch.Tensor:
    rounded_NK, unit_N1 = round_rows(matrix_NK)
    return rounded_NK.float() * unit_N1.float()


def test_rows_travel_as_torchao_rounds_them() -> None:
    """To the bit, in bfloat16 too; and a layer that rounds them by rows again has what it was given."""
    matrix_NK = narrow_and_wide()
    matrix_NK[3] = 0
    found = as_gathered(matrix_NK)
    assert torch.equal(found, rounded(matrix_NK, -1))
    assert torch.equal(found, found.bfloat16().float())
    assert torch.equal(rounded(found, -1), found)


def test_rounding_by_columns_loses_nothing_by_rows_but_of_small_numbers() -> None:
    matrix_NK = narrow_and_wide()
    direct, through = rounded(matrix_NK, 0), rounded(as_gathered(matrix_NK), 0)
    size_NK = matrix_NK.abs()
    small_NK = (size_NK < size_NK.amax(1, keepdim=True) / LOST) | (size_NK < size_NK.amax(0) / LOST)
    assert 0 < small_NK.sum() < 0.2 * small_NK.numel()
    assert torch.equal(direct[~small_NK], through[~small_NK])
    # A unit of a row or a column is 2^-9 / 224 of its largest number at most; two roundings err by half of each.
    unit_NK = torch.maximum(size_NK.amax(1, keepdim=True), size_NK.amax(0)) / (224 * 2**9)
    assert ((through - matrix_NK).abs() <= unit_NK)[small_NK].all()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_row_with_a_number_that_is_not_finite_stays_so(number: float) -> None:
    matrix_NK = narrow_and_wide()
    matrix_NK[5, 7] = number
    found = as_gathered(matrix_NK)
    assert found[5].isnan().any()
    assert found[:5].isfinite().all()
    assert found[6:].isfinite().all()


def test_gathering_in_8_bits_is_planned_as_less_to_send_and_to_hold() -> None:
    shape, plan = (
        Shape(read_model("llama-3.1-8b")),
        LayoutPlan(layout=Layout(dp_shard=8), micro_batch=1, micro_batches=1, recompute="selective"),
    )
    cluster = Cluster(device=read_device("h100"), nodes=1, devices_per_node=8)
    wide, narrow = (
        Job(tokens_per_step=8 * 8192, context=8192, precision="float8_tensorwise", gather=gather)
        for gather in (None, "float8")
    )
    matrices = sum(shape.layer(kind).total - shape.layer(kind).replicated for kind in shape.kinds)
    sent = [sum(traffic(shape, job, cluster, plan)["fsdp"].values()) for job in (wide, narrow)]
    # Gathered twice, a byte less each time, by every process of what the 7 others have.
    assert sent[0] - sent[1] == pytest.approx(2 * matrices * 7 / 8)
    # Of a pipeline all layers of a stage stay gathered.
    staged = replace(plan, layout=Layout(dp_shard=4, pp=2), micro_batches=2)
    held = [peak_memory(shape, job, staged).gathered for job in (wide, narrow)]
    assert held[0] - held[1] == matrices / 2
    times = [Clock(shape, job, cluster).step(plan) for job in (wide, narrow)]
    assert times[1].parts["fsdp"] <= times[0].parts["fsdp"]
    by_rows = Job(tokens_per_step=8 * 8192, context=8192, precision="float8_rowwise", gather="float8")
    assert sum(traffic(shape, by_rows, cluster, plan)["fsdp"].values()) == sent[1]
    assert peak_memory(shape, by_rows, staged).gathered == held[0]  # written out behind its way
    with pytest.raises(JobError, match="float8_tensorwise"):
        Job(tokens_per_step=8192, context=8192, precision="bf16", gather="float8")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"precision": "mxfp8"}, "precision=mxfp8"),
        ({"precision": "bf16"}, "precision=bf16"),
        ({"layout": {"dp_replicate": 2}}, "none share anything"),
        ({"layout": {}}, "one process"),
    ],
)
def test_a_run_in_which_nothing_is_gathered_so_is_refused(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=says):
        read_run(make_run(tmp_path, **(FLOAT8 | {"gather": "float8"} | changes)))


def uneven(run: Run) -> str:
    try:
        build_model(run, decoder_config(CONFIG, "the test"), Path(), "cpu")
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float8_tensorwise", "float8_rowwise"])
def test_rows_that_cannot_be_divided_evenly_are_refused_by_all(precision: str) -> None:
    values = {"out": "", "tokens": 3, "batch_tokens": 3, "context": 1, "data": {"train": [""]}}
    fields = {"layout": {"dp_shard": 3}, "precision": precision, "gather": "float8"}
    found = on_processes(3, uneven, parse_run(values | fields | {"model": {"config": {}}}))
    assert all("has 64 rows for 3 processes" in said for said in found)


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        ("float8_rowwise", {"dp_shard": 2}),
        *(
            pytest.param(precision, {"dp_shard": 2, **more}, marks=pytest.mark.slow)
            for precision, more in (
                ("float8_tensorwise", {}),
                ("float8_tensorwise", {"tp": 2}),
                ("float8_rowwise", {"tp": 2}),
                ("float8_rowwise_with_gw_hp", {"cp": 2}),
            )
        ),
    ],
)
def test_it_is_proved_within_what_float8_rounds(
    precision: str, layout: dict[str, int], tmp_path: Path
) -> None:
    """Four times the error of the same rounding on one process, which is `prove`'s own measure."""
    run = make_run(tmp_path, layout=layout, precision=precision, gather="float8")
    assert main(["prove", str(run)]) == 0


def test_the_planner_takes_the_word(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan-layout", "llama-3.1-8b", "--gather", "float8"]
    assert main([*words, "--precision", "float8_tensorwise", "--fix", "dp_shard=8,tp=1,pp=1,cp=1"]) == 0
    assert "float8_tensorwise gathered in float8" in " ".join(capsys.readouterr().out.split())
    assert main(words) == 2
    assert "use precision float8_tensorwise" in capsys.readouterr().err
