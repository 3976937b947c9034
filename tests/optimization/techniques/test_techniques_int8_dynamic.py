"""8-bit layers with a scale for each row, attention on our kernel: arithmetic, and what becomes of a whole graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.limits import LONGEST
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.engines.compiled.package import Package
from torchwright.optimization.engines.compiled.packaging import changed
from torchwright.optimization.engines.compiled.program import (
    compile_program,
    export,
    functional,
    read_programs,
    write_programs,
)
from torchwright.optimization.engines.dispatch.call import spec_of
from torchwright.optimization.techniques.int8_dynamic import Int8Dynamic, RowLinear
from torchwright.optimization.techniques.shared.encoder_graph import drop_masks, fuse_layers
from torchwright.workloads.module import ModuleWorkload

pytestmark = pytest.mark.skipif(bool(build.load_fault()), reason="the kernels are not built here")
STEPS = (
    Step(name="dtype"),
    Step(name="int8_dynamic"),
    Step(name="dense_attention"),
    Step(name="compile"),
)
RESULT_ERROR = 0.05
"""Relative, of bfloat16 with 8-bit layers on random weights."""


class Encoder(nn.Module):
    """A BERT layer as transformers writes it: three projections, a mask made of the input's shape, dropout."""

    def __init__(self, mask: str = "shape", activation: Callable[..., torch.Tensor] = F.gelu) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.up, self.down = nn.Linear(64, 192), nn.Linear(192, 64)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.dropout, self.mask, self.activation = nn.Dropout(0.1), mask, activation

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        B, T, E = x_BTE.shape
        q, k, v = (layer(x_BTE).view(B, T, 4, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        seen = torch.ones_like(x_BTE[..., 0]).bool()
        if self.mask == "values":
            seen = x_BTE[..., 0] > -1
        elif self.mask == "window":
            seen = torch.arange(T).expand(B, T) > 2
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None].expand(B, 1, T, T))
        x_BTE = self.norms[0](x_BTE + self.dropout(self.out(y.transpose(1, 2).reshape(B, T, E))))
        return self.norms[1](self.down(self.activation(self.up(x_BTE))) + x_BTE)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def exported(model: nn.Module, x: torch.Tensor, steps: tuple[Step, ...] = STEPS) -> tuple[Any, Any]:
    """A target after the steps, and its functional graph before it is rewritten."""
    target = make_target(ModuleWorkload(model.eval(), (x,)), get_device("cpu").identify())
    apply_steps(target, steps)
    cases = target.workload.cases(target.compute_dtype)
    return target, functional(export(target.model, cases)[cases[0].name])


def calls(program: Any, name: str) -> list[Any]:
    return [node for node in program.graph.nodes if name in str(node.target)]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_rounds_every_row_by_itself(dtype: torch.dtype) -> None:
    layer = nn.Linear(48, 40).to(dtype)
    x = (torch.randn(6, 48) * torch.logspace(-3, 3, 6)[:, None]).to(dtype)
    packed = RowLinear(layer)
    with torch.no_grad():
        got, wanted = packed(x), layer.double()(x.double())
    assert got.dtype == dtype
    assert packed.weight.dtype == dtype
    for row, exact in zip(got, wanted, strict=True):
        assert relative(row, exact) < 0.03


@pytest.mark.plain("tanh-none")
@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (F.gelu, "gelu"),
        (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh"),
        (F.relu, "relu"),
        (F.silu, "silu"),
        (torch.tanh, "none"),
    ],
)
def test_a_graph_joins_layers_with_their_neighbours(activation: Any, name: str) -> None:
    x = torch.randn(2, 12, 64)
    _, program = exported(Encoder(activation=activation), x)
    before = program.module()(x)
    fuse_layers(program.graph_module)
    layers = calls(program, "linear_w8a8_fused")
    assert [(n.args[5], n.args[6], n.args[7] is not None) for n in layers] == [
        (192, "none", False),  # query, key and value
        (64, "none", True),
        (192, name, False),
        (64, "none", True),
    ]
    assert not calls(program, "dropout")
    assert bool(calls(program, "tanh")) == (name == "none")
    assert relative(program.module()(x), before) < 1e-2


@pytest.mark.plain("window-True")
@pytest.mark.parametrize(("mask", "kept"), [("shape", False), ("values", True), ("window", True)])
def test_only_a_mask_that_hides_nothing_is_left_out(mask: str, kept: bool) -> None:
    x = torch.randn(2, 12, 64)
    target, program = exported(Encoder(mask), x)
    assert [row.changed for row in target.coverage if row.technique == "dense_attention"] == [1]
    drop_masks(program.graph_module)
    (attention,) = calls(program, "torchwright.attention")
    assert (attention.args[3] is not None) == kept
    with torch.no_grad():
        assert relative(program.module()(x), Encoder.forward(target.workload.build(), x)) < RESULT_ERROR


def test_masks_that_are_written_to_or_drawn_are_no_constants() -> None:
    class Written(nn.Module):
        def __init__(self, drawn: bool) -> None:
            super().__init__()
            self.linear, self.drawn = nn.Linear(16, 16), drawn

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.zeros(x.shape[2], x.shape[2])
            mask = mask + torch.rand(x.shape[2]) if self.drawn else mask.add_(x[0, 0, :, :1])
            return self.linear(F.scaled_dot_product_attention(x, x, x, attn_mask=mask))

    for drawn in (True, False):
        x = torch.randn(1, 2, 8, 16)
        workload = ModuleWorkload(Written(drawn).eval(), (x,))
        program = functional(export(workload.build(), workload.cases(torch.float32))["forward"])
        drop_masks(program.graph_module)
        (attention,) = calls(program, "scaled_dot_product_attention")
        assert len(attention.args) > 3 or "attn_mask" in attention.kwargs


@pytest.mark.slow
def test_what_a_graph_calls_survives_a_file_and_the_compiler(tmp_path: Any) -> None:
    x = torch.randn(2, 12, 64)
    target, program = exported(Encoder(), x)
    for rewrite in target.settings.rewrites:
        rewrite(program.graph_module)
    write_programs(tmp_path, {"forward": program})
    kept = read_programs(tmp_path)["forward"]
    with torch.no_grad():
        wanted = target.workload.build()(x)
        assert relative(kept.module()(x), wanted) < RESULT_ERROR
        compile_program(kept, tmp_path / "model.pt2", target.settings.inductor)
        package = Package(tmp_path / "model.pt2", spec_of("forward", kept))
        assert relative(package.run([x]), wanted) < RESULT_ERROR


class Ends(nn.Module):
    """The last operator is one that joins the layer before it."""

    def __init__(self, last: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(64, 64), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x, self.linear(x))


@pytest.mark.plain("<lambda>1")
@pytest.mark.parametrize("last", [torch.add, lambda x, y: F.relu(y), lambda x, y: x + F.relu(y)])
def test_a_graph_may_end_where_layers_are_joined(last: Any, tmp_path: Any) -> None:
    """A block that ends in a residual addition could not be written: its signature named the old addition."""
    x = torch.randn(4, 64)
    target, program = exported(Ends(last), x, (Step(name="int8_dynamic"), Step(name="compile")))
    program = changed(program, target.settings)
    assert not calls(program, "aten.add")
    assert not calls(program, "aten.relu")
    write_programs(tmp_path, {"forward": program})
    with torch.no_grad():
        found = read_programs(tmp_path)["forward"].module()(x)
        assert relative(found, target.workload.build()(x)) < RESULT_ERROR


def test_attention_that_the_kernel_does_not_take_is_named() -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            x = F.scaled_dot_product_attention(x, x, x, is_causal=True) + F.scaled_dot_product_attention(
                x, x, x
            )
            return F.scaled_dot_product_attention(x[..., :8], x[..., :8], x)

    target = make_target(
        ModuleWorkload(Causal().eval(), (torch.randn(1, 2, 8, 16),)), get_device("cpu").identify()
    )
    apply_steps(target, STEPS)
    (row,) = [row for row in target.coverage if row.technique == "dense_attention"]
    assert (row.changed, row.total) == (1, 3)
    assert row.skipped["call 0"] == "it is causal"
    assert "keys (1, 2, 8, 8), values (1, 2, 8, 16)" in row.skipped["call 2"]


def test_a_layer_that_is_too_wide_for_the_kernel_is_not_ranked() -> None:
    assert Int8Dynamic().module_error(nn.Linear(LONGEST + 1, 1), torch.randn(2, LONGEST + 1)) is None
    error = Int8Dynamic().module_error(nn.Linear(64, 16), torch.randn(2, 64))
    assert error is not None
    assert 0 < error < RESULT_ERROR


class ReadsWeights(nn.Module):
    """A layer that is called after one whose owner reads its parameters, as in torchvision's windows."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(F.linear(x, self.read.weight, self.read.bias))


def test_a_layer_that_is_read_and_not_called_stays() -> None:
    model, x = ReadsWeights().eval(), torch.randn(8, 64)
    target = make_target(ModuleWorkload(model, x), get_device("cpu").facts())
    apply_steps(target, STEPS[:2] + STEPS[3:])
    (coverage,) = [c for c in target.coverage if c.technique == "int8_dynamic"]
    assert (coverage.changed, coverage.total) == (1, 2)
    assert coverage.skipped == {"read": "it is not called on the example inputs"}
    with torch.no_grad():
        wanted = model(x)
        assert (target.model(x) - wanted).norm() < RESULT_ERROR * wanted.norm()
