"""Adapters: the formula against matrices put together by hand, what is kept of a run, peft's files, four bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CONFIG, assert_same, checkpoints, losses, make_run, run_processes, state
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import torchwright as tw
from torchwright.core.errors import ModelError, UnknownName
from torchwright.hub.run_folder import ADAPTER
from torchwright.train.model.four_bit import BLOCK, NF4, FourBit, FourBitLinear
from torchwright.train.model.lora import (
    adapters,
    add_adapters,
    freeze,
    merged_weight,
    reset_adapters,
)
from torchwright.train.prove.processes import ProveError
from torchwright.train.prove.proof import prove_file
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.loop.train import train
from torchwright.train.run.observe.metrics import read_figures
from torchwright.train.run.runtime.checkpoint import CheckpointError

DATA = {"train": ["a.npy", "b.npy"], "validation": ["held.npy"]}
LORA: dict[str, Any] = {"r": 4, "alpha": 12.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has been trained a little."""
    model = {"config": CONFIG | {"intermediate_size": 2 * BLOCK}}
    outcome = train(make_run(tmp_path_factory.mktemp("base"), tokens=512, model=model), live=False)
    assert outcome.model
    return outcome.model


def adapted(tmp_path: Path, base: Path, **changes: Any) -> Path:
    lora = LORA | changes.pop("lora", {})
    return make_run(tmp_path, model={"folder": str(base)}, lora=lora, **changes)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_an_adapter_computes_and_learns_as_the_formula_says(dora: bool, bias: bool) -> None:
    """float64: outputs and gradients of inputs, A, B and m against W + s·BA put together, to 1e-12."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 12, bias=bias)).double()
    freeze(model, torch.float64)
    add_adapters(model, ["0"], r=3, alpha=6.0, dropout=0.0, dora=dora)
    model.double()
    reset_adapters(model, 0)
    adapter = adapters(model)["0"]
    linear = model[0]
    x = torch.randn(5, 20, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(model(x), F.linear(x, linear.weight, linear.bias), atol=1e-12, rtol=0)
    with torch.no_grad():
        adapter.B.normal_()
        if adapter.magnitude is not None:
            adapter.magnitude.uniform_(1, 2)

    def by_hand() -> torch.Tensor:
        full = linear.weight + 6.0 / 3 * adapter.B @ adapter.A
        if adapter.magnitude is not None:
            full = full * (adapter.magnitude / full.detach().norm(dim=1))[:, None]
        return F.linear(x, full, linear.bias)

    ours, theirs = model(x), by_hand()
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    learnt = [x, *adapter.parameters()]
    weight = torch.randn_like(ours)
    for one, other in zip(
        torch.autograd.grad((ours * weight).sum(), learnt),
        torch.autograd.grad((theirs * weight).sum(), learnt),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)
    torch.testing.assert_close(F.linear(x, merged_weight(linear), linear.bias), theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("shape", [(2, 3, 8), (8,), (0, 8)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_layer_and_adapter_in_one_take_any_shape(shape: tuple[int, ...], turned: bool) -> None:
    """float64, 1e-11: outputs and gradients of what lies otherwise in memory, of one row and of none."""
    model = nn.Sequential(nn.Linear(8, 6)).double()
    freeze(model, torch.float64)
    add_adapters(model, ["0"], r=2, alpha=4.0, dropout=0.0, dora=False)
    model.double()
    reset_adapters(model, 0)
    adapter, linear = adapters(model)["0"], model[0]
    nn.init.normal_(adapter.B)
    x = torch.randn(shape[::-1] if turned else shape, dtype=torch.float64)
    x = (x.permute(*reversed(range(x.ndim))) if turned else x).requires_grad_()
    ours = model(x)
    theirs = F.linear(x, linear.weight + 2 * adapter.B @ adapter.A, linear.bias)
    torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=0)
    learnt = [x, adapter.A, adapter.B]
    pairs = [torch.autograd.grad(y.square().sum(), learnt) for y in (ours, theirs)]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("kind", ["nf4", "int4"])
def test_four_bits_hold_the_nearest_value_and_multiply_by_it(kind: Any) -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 2 * BLOCK)
    linear = nn.Linear(2 * BLOCK, 24)
    packed = FourBitLinear(linear, kind)
    packed.weight.pack(weight)
    values = packed.weight.values(torch.float32)
    if kind == "nf4":
        scale = weight.view(24, 2, BLOCK).abs().amax(2, keepdim=True)
        grid = torch.tensor(NF4)
        nearest = (weight.view(24, 2, BLOCK, 1) / scale[..., None] - grid).abs().argmin(-1)
        torch.testing.assert_close(values, (grid[nearest] * scale).view_as(weight))
    assert (values - weight).norm() / weight.norm() < 0.12
    x = torch.randn(3, 2 * BLOCK, requires_grad=True)
    y = packed(x)
    torch.testing.assert_close(y, F.linear(x, values, linear.bias))
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(gradient, 2 * y.detach() @ values)
    assert packed.weight.codes.nbytes == weight.numel() // 2


def test_nf4_is_torchaos() -> None:
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    weight = torch.randn(32, 4 * BLOCK)
    packed = FourBit(weight.shape, "nf4", torch.float32)
    packed.pack(weight)
    theirs = nf4.to_nf4(weight, BLOCK, 32).get_original_weight()
    # Theirs rounds the scales to 8 bits too.
    far = (packed.values(torch.float32) - theirs).abs() > 0.01
    assert far.float().mean() < 0.01, "but for weights between two values"


@pytest.mark.plain("{'dropout': 0.2}")
@pytest.mark.parametrize(
    "lora", [{}, {"dora": True}, {"dropout": 0.2}, {"base": "nf4"}, {"base": "int4"}], ids=str
)
def test_adapters_learn_resume_bit_for_bit_and_merge(
    tmp_path: Path, base: Path, lora: dict[str, Any]
) -> None:
    run = adapted(
        tmp_path / "whole",
        base,
        lora=lora,
        data=DATA,
        evaluation={"every_steps": 1},
        optimizer={"lr": 1e-2},
        checkpoint={"every_steps": 2, "keep": 9},
    )
    outcome = train(run, live=False)
    assert outcome.model is None
    assert outcome.adapter == tmp_path / "whole" / "out" / ADAPTER
    assert outcome.validation_loss < read_figures(outcome.out)[1]["validation_loss"] - 0.01
    held = state(checkpoints(run)[-1])
    assert all(".lora." in name for name in held)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    again = tmp_path / "again" / "run.toml"
    for later in checkpoints(again)[1:]:
        shutil.rmtree(later)
    again.write_text(again.read_text().replace("[lora]", "[lora]\nmerge = true"))
    merged = train(again, live=False)
    assert_same(state(checkpoints(again)[-1]), held)
    assert merged.model
    ids = torch.arange(40)[None] % 128
    before, after = (tw.load_decoder(folder).logits(ids) for folder in (base, merged.model))
    assert (before - after).abs().max() > 1e-3


def test_other_weights_under_a_checkpoint_of_adapters_are_refused(tmp_path: Path, base: Path) -> None:
    shutil.copytree(base, tmp_path / "model")
    run = adapted(tmp_path, tmp_path / "model", tokens=512)
    train(run, live=False)
    other = load_file(tmp_path / "model" / "model.safetensors")
    from safetensors.torch import save_file

    save_file({name: value * 2 for name, value in other.items()}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"base\.model\.safetensors"):
        train(run, live=False)


def test_what_does_not_go_with_adapters_is_said(tmp_path: Path, base: Path) -> None:
    for changes, words in (
        ({"model": {"config": CONFIG}, "lora": LORA}, "adapts a trained model"),
        ({"layout": {"tp": 2}}, "the layout divides them"),
        ({"qat": {"scheme": "w4a8"}}, "does not go with qat"),
        ({"precision": "mxfp8"}, "precision=mxfp8"),
    ):
        with pytest.raises(RunError, match=words):
            train(make_run(tmp_path, **{"model": {"folder": str(base)}, "lora": LORA, **changes}), live=False)
    with pytest.raises(UnknownName, match="did you mean 'q_proj'"):
        train(adapted(tmp_path, base, lora={"targets": ["qproj"]}), live=False)


def test_a_run_with_adapters_is_not_proved(tmp_path: Path, base: Path) -> None:
    with pytest.raises(ProveError, match=r"prove the run without \[lora\]"):
        prove_file(adapted(tmp_path, base))


def test_buffers_keep_their_type() -> None:
    """Angles of rotary embeddings and biases of experts: rounded, they are those of another model."""
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("inv_freq", torch.rand(2))
    before = model.get_buffer("inv_freq").clone()
    freeze(model, torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model.get_buffer("inv_freq"), before)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ModelError, match=r"blocks of 64 weights.*with 20 inputs"):
        freeze(nn.Sequential(nn.Linear(20, 12)), torch.float32, "nf4", ["0"])


@pytest.mark.parametrize("base_kind", ["fp32", pytest.param("int4", marks=pytest.mark.slow)])
def test_sharded_adapters_equal_one_process(tmp_path: Path, base: Path, base_kind: str) -> None:
    """Losses to 1e-5 and what is written to 3e-5: float32 in another order."""
    changes: dict[str, Any] = {"lora": {"base": base_kind, "merge": True, "dora": base_kind == "fp32"}}
    alone = adapted(tmp_path / "alone", base, **changes)
    train(alone, live=False)
    two = adapted(tmp_path / "two", base, layout={"dp_shard": 2}, **changes)
    for code, told in run_processes(two, world=2):
        assert code == 0, told
    assert list(losses(two).values()) == pytest.approx(list(losses(alone).values()), rel=1e-5)
    for part in (f"{ADAPTER}/adapter_model.safetensors", "model/model.safetensors"):
        one, other = (load_file(run.parent / "out" / part) for run in (alone, two))
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(tensor, other[name], atol=3e-5, rtol=0, msg=name)
