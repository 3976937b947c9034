"""Which optimizer moves which parameter: Muon on every matrix of the layers, an expert's too, AdamW on the rest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CONFIG, MIXTURE, checkpoints, losses, make_run, run_processes
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchwright.models.decoder import read_decoder_config
from torchwright.train.model import Transformer
from torchwright.train.prove.processes import on_processes
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.read import read_run
from torchwright.train.run.config.run import OptimizerSection
from torchwright.train.run.loop.train import train
from torchwright.train.run.objectives.optimizer import Optimizers

MUON = {"name": "muon", "lr": 3e-3, "adam_lr": 1e-3}


def mixture(folder: Path) -> Transformer:
    (folder / "config.json").write_text(json.dumps(CONFIG | MIXTURE))
    model = Transformer(read_decoder_config(folder))
    model.reset_parameters(0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return model


def test_muon_moves_each_experts_matrix_by_itself(tmp_path: Path) -> None:
    model = mixture(tmp_path)
    up = model.get_parameter("layers.1.mlp.experts.up")
    assert up.grad is not None
    alone = [matrix.clone() for matrix in up.detach()]
    for matrix, gradient in zip(alone, up.grad.clone(), strict=True):
        matrix.grad = gradient
    torch.optim.Muon(alone, lr=3e-3, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw").step()
    optimizers = Optimizers(model, OptimizerSection(name="muon", lr=3e-3), compiled=False)
    optimizers.step(1.0)
    assert torch.equal(up.detach(), torch.stack(alone))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {f"layers.1.mlp.experts.up.{expert}.momentum_buffer" for expert in range(4)} <= set(
        optimizers.tensors()
    )


def test_adamw_moves_the_rest_and_decays_the_layers_matrices_alone(tmp_path: Path) -> None:
    """A step without gradient is the decay: routers have one, embedding, output layer and norms have none."""
    model = mixture(tmp_path)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers = Optimizers(
        model, OptimizerSection(name="muon", lr=1.0, adam_lr=0.5, weight_decay=0.1), compiled=False
    )
    optimizers.step(1.0)
    for name, parameter in model.named_parameters():
        inside = name.startswith("layers.") and parameter.dim() > 1
        rate = 0.5 if name.endswith("router.weight") else 1.0
        expected = before[name] * (1 - rate * 0.1 * inside)
        torch.testing.assert_close(parameter.detach(), expected, msg=name)
    routers = [name for name in optimizers.tensors() if ".router." in name]
    assert routers
    assert not any("momentum" in name for name in routers)


def test_adafactor_keeps_rows_and_columns_and_takes_no_word_of_adamw(tmp_path: Path) -> None:
    model = mixture(tmp_path)
    optimizers = Optimizers(model, OptimizerSection(name="adafactor", lr=3e-3), compiled=False)
    optimizers.step(1.0)
    kept, whole = optimizers.tensors(), model.get_parameter("layers.0.attention.q.weight").shape
    assert kept["layers.0.attention.q.weight.row_var"].shape == (whole[0], 1)
    assert kept["layers.0.attention.q.weight.col_var"].shape == (1, whole[1])
    for word in ({"betas": [0.9, 0.99]}, {"eps": 1e-6}):
        run = make_run(tmp_path / "run", optimizer={"name": "adafactor", **word})
        with pytest.raises(RunError, match=r"optimizer\.betas and optimizer\.eps are AdamW's"):
            read_run(run)


def test_moments_in_few_bits_take_few_bytes(tmp_path: Path) -> None:
    model = mixture(tmp_path)
    bytes_of: dict[str, int] = {}
    for name in ("adamw", "adamw8bit", "adamw4bit"):
        optimizers = Optimizers(model, OptimizerSection.model_validate({"name": name}), compiled=False)
        optimizers.prepare()
        up = {key: value for key, value in optimizers.tensors().items() if "experts.up.exp_avg" in key}
        bytes_of[name] = sum(value.numel() * value.element_size() for value in up.values())
    count = model.get_parameter("layers.0.mlp.experts.up").numel() * len(model.layers)
    # Two moments; a float32 scale for 256 codes of 8 bits, or for 128 of 4 bits.
    expected = {"adamw": 8.0, "adamw8bit": 2 * (1 + 4 / 256), "adamw4bit": 2 * (0.5 + 4 / 128)}
    assert {name: size / count for name, size in bytes_of.items()} == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [MUON, {"name": "adafactor", "lr": 3e-3}], ids=["muon", "adafactor"])
def test_copies_and_shards_train_as_one_process(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    """Shards go on from a checkpoint with the bits of those that were not stopped: the owners' state is in it."""
    changes = {"model": {"config": CONFIG | MIXTURE}, "optimizer": optimizer}
    changes["checkpoint"] = {"every_steps": 3, "keep": 9}
    alone = make_run(tmp_path / "alone", **changes)
    train(alone, live=False)
    for axis in ("dp_replicate", "dp_shard"):
        run = make_run(tmp_path / axis, layout={axis: 2}, **changes)
        for code, told in run_processes(run, world=2):
            assert code == 0, told
        # Muon turns by its gradient in bfloat16.
        assert losses(run) == pytest.approx(losses(alone), rel=2e-3)
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "dp_shard", again)
    shutil.rmtree(checkpoints(again / "run.toml")[-1])
    shutil.rmtree(again / "out" / "model")
    for code, told in run_processes(again / "run.toml", world=2, resume=True):
        assert code == 0, told
    ours, theirs = (
        load_file(run.parent / "out/model/model.safetensors") for run in (again / "run.toml", run)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def owned() -> dict[str, list[str]]:
    """The names of the state that this process keeps of a layer that two share out, by optimizer."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(8, 6), nn.Linear(6, 8)])
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    found = {}
    for name in ("muon", "adafactor"):
        optimizers = Optimizers(model, OptimizerSection.model_validate({"name": name}), compiled=False)
        optimizers.prepare()
        found[name] = sorted(optimizers.tensors())
    return found


def test_each_matrix_that_is_shared_out_has_one_owner() -> None:
    """State is on one process, work is divided, and one that owns nothing has no optimizer for it."""
    first, second = on_processes(2, owned)
    assert "layers.0.weight.momentum_buffer" in first["muon"]
    assert "layers.1.weight.momentum_buffer" in second["muon"]
    assert not set(first["adafactor"]) & set(second["adafactor"])
    names = {name.rpartition(".")[0] for name in (*first["adafactor"], *second["adafactor"])}
    assert names == {f"layers.{layer}.{part}" for layer in (0, 1) for part in ("weight", "bias")}
