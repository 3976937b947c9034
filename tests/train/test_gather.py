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
from torchwright.train.run.objectives.setup import build_model
from torchwright.train.shape import Shape

FLOAT8 = {"precision": "float8_tensorwise", "layout": {"dp_shard": 2}}
BIASED = CONFIG | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


@pytest.mark.slow
def test_losses_stay_near_and_a_run_that_goes_on_has_the_same_bits(tmp_path: Path) -> None:
    """Beside the run that gathers in bfloat16, losses stay within 0.3%: weights are rounded once and not twice."""
    keep = {"every_steps": 3, "keep": 9}
    runs = [
        make_run(tmp_path / name, **FLOAT8, checkpoint=keep, **changes)
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
def test_the_planner_counts_the_bytes_that_travel() -> None:
    """A layer's message is what the planner says: 8 bits for a matrix, 16 for norms and biases."""
    shape = Shape(decoder_config(BIASED, "the test"))
    (kind,) = set(shape.kinds)
    layer = shape.layer(kind)
    assert layer.biases == 64 + 2 * 32
    for gather, matrix in ((None, 2), ("float8", 1)):
        values = {"out": "", "tokens": 1, "batch_tokens": 1, "context": 1, "data": {"train": [""]}}
        run = parse_run(values | FLOAT8 | {"model": {"config": {}}, "gather": gather})
        (sent, _) = on_processes(2, messages, run, BIASED)
        bytes_of_layer = matrix * (layer.total - layer.biases - layer.replicated)
        bytes_of_layer += 2 * (layer.biases + layer.replicated)
        # Padded to whole rows for each process: none here.
        assert sent.count(bytes_of_layer // 2) == len(shape.kinds)


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
    with pytest.raises(JobError, match="float8_tensorwise"):
        Job(tokens_per_step=8192, context=8192, precision="bf16", gather="float8")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"precision": "float8_rowwise"}, "once by rows and once by columns"),
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


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_is_proved_within_what_float8_rounds(tp: int, tmp_path: Path) -> None:
    """Four times the error of the same rounding on one process, which is `prove`'s own measure."""
    run = make_run(tmp_path, **FLOAT8 | {"layout": {"dp_shard": 2, "tp": tp}}, gather="float8")
    assert main(["prove", str(run)]) == 0


def test_the_planner_takes_the_word(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan-layout", "llama-3.1-8b", "--gather", "float8"]
    assert main([*words, "--precision", "float8_tensorwise", "--fix", "dp_shard=8,tp=1,pp=1,cp=1"]) == 0
    assert "float8_tensorwise gathered in float8" in " ".join(capsys.readouterr().out.split())
    assert main(words) == 2
    assert "use precision float8_tensorwise" in capsys.readouterr().err
