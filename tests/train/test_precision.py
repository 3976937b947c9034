"""Low precision from outside: which layers change, what they round, and that training with them goes down."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from runs import CONFIG, MIXTURE, losses, make_run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torchwright.models.decoder import read_decoder_config
from torchwright.models.decoder.families import decoder_config
from torchwright.train.model import Transformer
from torchwright.train.model.blocks import Experts
from torchwright.train.prove.processes import on_processes
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.run import Precision
from torchwright.train.run.loop.train import train
from torchwright.train.run.objectives.precision import MXLinear, autocast, convert, mx_round

E4M3 = [0.0] + [m / 8 * 2.0**e for e in range(-6, 9) for m in range(8, 16) if m * 2.0**e <= 448 * 8]
E4M3 += [m / 8 * 2.0**-6 for m in range(1, 8)]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
LARGEST_EXPONENT = {"mxfp8": 8, "mxfp4": 2}


def slow_mx(x: torch.Tensor, format: str) -> torch.Tensor:
    """OCP MX 1.0, section 6.3, one block at a time: a power of two, then the nearest value (ties to even mantissas)."""
    values = torch.tensor(sorted(E4M3 if format == "mxfp8" else E2M1), dtype=torch.float64)
    out = torch.empty_like(x, dtype=torch.float64)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], 32):
            block = x[row, start : start + 32].double()
            peak = float(block.abs().max())
            if peak == 0:
                out[row, start : start + 32] = 0
                continue
            scale = 2.0 ** (torch.tensor(peak).log2().floor().item() - LARGEST_EXPONENT[format])
            scaled = (block.abs() / scale).clamp(max=float(values[-1]))
            distance = (scaled[:, None] - values).abs()
            # Of two that are as near, the one with the even place in the table has the even mantissa.
            tie = torch.arange(len(values)) % 2 * 1e-12
            out[row, start : start + 32] = values[(distance + tie).argmin(1)] * scale * block.sign()
    return out


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_mx_rounds_to_the_format(format: str) -> None:
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 6)[:, None]
    x[2, :32] = 0
    x = x.bfloat16()
    assert torch.equal(mx_round(x, format).double(), slow_mx(x, format))


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_an_mx_layer_rounds_along_what_each_product_sums_over(format: str) -> None:
    """Against the same three products of slowly rounded operands in float64; bfloat16's rounding of sums apart."""
    torch.manual_seed(1)
    linear = nn.Linear(64, 96)
    layer = MXLinear.around(linear, format)  # type: ignore[arg-type]
    x = torch.randn(2, 5, 64, requires_grad=True)
    grad = torch.randn(2, 5, 96)
    layer(x).backward(grad.to(torch.bfloat16))

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        pad = -tensor.shape[1] % 32
        wide = nn.functional.pad(tensor.detach().bfloat16(), (0, pad))
        return slow_mx(wide, format)

    flat, g = x.detach().flatten(0, 1), grad.flatten(0, 1)
    y = rounded(flat) @ rounded(linear.weight).T + linear.bias.detach().double()
    grad_x = rounded(g) @ rounded(linear.weight.T).T
    grad_w = rounded(g.T) @ rounded(flat.T).T
    for found, wanted in ((layer(x), y), (x.grad, grad_x), (linear.weight.grad, grad_w)):
        assert found is not None
        error = (found.detach().double().view_as(wanted) - wanted).abs().max() / wanted.abs().max()
        assert error < 8e-3


@pytest.mark.plain("mxfp8")
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_experts_are_multiplied_in_mx_as_each_by_itself(format: str) -> None:
    """Forward and backward of every expert's products, rounded slowly and taken in float64; one has no token."""
    config = decoder_config(CONFIG | MIXTURE, "the test")
    assert config.experts is not None
    model = nn.Module()
    model.layers = nn.ModuleList([Experts(config, config.experts)])
    (experts,) = model.layers
    assert isinstance(experts, Experts)
    for matrix in experts.parameters():
        nn.init.normal_(matrix, std=matrix.shape[-1] ** -0.5)
    convert(model, format, "cpu")  # type: ignore[arg-type]
    counts = torch.tensor([5, 0, 33, 2])
    x = torch.randn(40, config.model, requires_grad=True)
    out = experts.compute(x, counts, experts.gate, experts.up, experts.down, experts.activation)
    gradient = torch.randn(out.shape).to(out.dtype)
    out.backward(gradient)

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        wide = nn.functional.pad(tensor.detach().bfloat16(), (0, -tensor.shape[1] % 32))
        return slow_mx(wide, format)

    parts = zip(x.split(counts.tolist()), gradient.split(counts.tolist()), strict=True)
    wanted_out, wanted_x, wanted = [], [], {name: [] for name in ("gate", "up", "down")}
    for expert, (rows, g) in enumerate(parts):
        gate, up, down = (matrix[expert].detach() for matrix in (experts.gate, experts.up, experts.down))
        u, v = (rounded(rows) @ rounded(matrix).T for matrix in (gate, up))
        u, v = (part.bfloat16().double().requires_grad_() for part in (u, v))
        hidden = nn.functional.silu(u) * v
        wanted_out.append(rounded(hidden) @ rounded(down).T)
        hidden.backward(rounded(g) @ rounded(down.T).T)
        assert u.grad is not None
        assert v.grad is not None
        wanted_x.append(rounded(u.grad) @ rounded(gate.T).T + rounded(v.grad) @ rounded(up.T).T)
        for name, to, of in (("gate", u.grad, rows), ("up", v.grad, rows), ("down", g, hidden)):
            wanted[name].append(rounded(to.T) @ rounded(of.T).T)
    pairs = [(out, torch.cat(wanted_out)), (x.grad, torch.cat(wanted_x))]
    pairs += [(getattr(experts, name).grad, torch.stack(parts)) for name, parts in wanted.items()]
    for found, expected in pairs:
        assert found is not None
        error = (found.detach().double() - expected).norm() / expected.norm()
        # A product rounded to bfloat16 first can turn the next rounding of a few values.
        assert error < (2e-2 if format == "mxfp8" else 6e-2)
    assert not experts.gate.grad[1].any()  # type: ignore[index]


def make_model(folder: Path) -> Transformer:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = Transformer(read_decoder_config(folder))
    model.reset_parameters(0)
    return model


def test_only_the_layers_linear_modules_change(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    names = convert(model, "mxfp8", "cpu")
    assert len(names) == 2 * 7
    assert type(model.head) is nn.Linear
    assert convert(make_model(tmp_path), "bf16", "cpu") == []


def test_a_model_without_fitting_layers_is_refused() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(20, 20)])
    with pytest.raises(RunError, match="has no layer to work on"):
        convert(model, "float8_rowwise", "cpu")


@pytest.mark.parametrize(
    "precision", ["float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp", "mxfp8", "mxfp4"]
)
def test_gradients_are_near_those_of_bf16(tmp_path: Path, precision: str) -> None:
    """Rounding to 3 mantissa bits or 1: the direction stays (cosine above 0.97, and 0.8 for float4), not the digits."""
    ids = torch.randint(2, 128, (4, 32), generator=torch.Generator().manual_seed(3))
    grads = []
    for chosen in ("bf16", precision):
        model = make_model(tmp_path)
        convert(model, chosen, "cpu")  # type: ignore[arg-type]
        with autocast(chosen, "cpu"):  # type: ignore[arg-type]
            total, valid = model.loss(ids[:, :-1], ids[:, 1:])
        (total / valid).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.layers.parameters()]))  # type: ignore[union-attr]
    cosine = nn.functional.cosine_similarity(*grads, dim=0)
    assert cosine > (0.8 if precision == "mxfp4" else 0.97)
    assert not torch.equal(*grads)


def float8_products(precision: Precision, tp: int, columns: bool) -> list[list[float]]:
    """Output and both gradients of a float8 layer, whose parts are of very different sizes."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleDict({"q": nn.Linear(64, 96, bias=False)})})
    layer: Any = model.get_submodule("layers.q")
    with torch.no_grad():
        layer.weight[:48] *= 1000
        layer.weight[:, :32] *= 30
    x, grad = torch.randn(2, 16, 64), torch.randn(2, 16, 96)
    x[..., 32:] *= 200
    grad[..., :48] *= 300
    assert convert(model, precision, "cpu") == ["layers.q"]
    if tp > 1:
        mesh = init_device_mesh("cpu", (tp,))
        style = (
            ColwiseParallel(output_layouts=Replicate())
            if columns
            else RowwiseParallel(input_layouts=Replicate())
        )
        parallelize_module(model, mesh, {"layers.q": style})
    x.requires_grad_()
    with autocast(precision, "cpu"):
        y = model.get_submodule("layers.q")(x)
    y.backward(grad.to(y.dtype))
    weight: Any = model.get_submodule("layers.q").weight
    whole = weight.grad.full_tensor() if tp > 1 else weight.grad
    assert x.grad is not None
    return [tensor.float().flatten().tolist() for tensor in (y.detach(), x.grad, whole)]


@pytest.mark.slow  # `test_gather` proves float8 over two processes
@pytest.mark.parametrize(
    ("precision", "columns"), list(itertools.product(get_args(Precision)[2:5], (True, False)))
)
def test_parts_of_a_matrix_are_rounded_as_the_whole_is(precision: Precision, columns: bool) -> None:
    """To the bit, but for the one product that is summed over processes, in bfloat16."""
    assert precision.startswith("float8")
    alone = [torch.tensor(values) for values in float8_products(precision, 1, columns)]
    found = [torch.tensor(values) for values in on_processes(2, float8_products, precision, 2, columns)[0]]
    summed = 1 if columns else 0
    for place, (one, other) in enumerate(zip(alone, found, strict=True)):
        if place == summed:
            assert (one - other).norm() < 2**-7 * one.norm()
        else:
            assert torch.equal(one, other)


@pytest.mark.slow  # `test_trainer_run` learns, and recomputation changes no bit
@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "float8_rowwise", "recompute": "full"},
        {"precision": "mxfp8", "recompute": "selective"},
        {"precision": "bf16", "recompute": "selective"},
    ],
    ids=lambda changes: "-".join(changes.values()),
)
def test_training_goes_down(tmp_path: Path, changes: dict[str, str]) -> None:
    run = make_run(tmp_path, tokens=10 * 256, checkpoint={}, **changes)
    train(run, live=False)
    found = losses(run)
    assert found[10] < found[1] - 0.3


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputation_changes_no_bit(tmp_path: Path, how: str) -> None:
    plain = make_run(tmp_path / "plain", tokens=512)
    train(plain, live=False)
    again = make_run(tmp_path / "again", tokens=512, recompute=how)
    train(again, live=False)
    assert losses(again) == losses(plain)
