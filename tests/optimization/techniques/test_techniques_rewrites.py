"""Rewrites of whole graphs change no value, whatever a model does with views, in-place operators and shared layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchwright.hardware.kernels.cpu import build
from torchwright.optimization.engines.compiled.program import export_one, functional
from torchwright.optimization.techniques.int8_dynamic import RowLinear
from torchwright.optimization.techniques.shared.encoder_graph import fuse_layers
from torchwright.optimization.techniques.shared.int8 import Int8Layer, activation_range
from torchwright.optimization.techniques.shared.int8_graph import share_integers
from torchwright.workloads.base import Case

ROUNDING = 0.05
"""Relative: a residual that is read as integers, and a sum whose last bit moves a value into the next step."""
OPERATIONS = ("layer", "relu", "relu_", "add", "add_", "view", "pool", "part_add_", "part_layer_")

Line = tuple[str, int, int, int]
"""What is done, with which two of the values so far, and by which layer."""


class Straight(nn.Module):
    """A straight program over values of one shape; its layers are reused, its values read and written again."""

    def __init__(self, layers: nn.ModuleList, lines: list[Line]) -> None:
        super().__init__()
        self.layers, self.lines = layers, lines

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        values = [x.clone()]
        for operation, first, second, which in self.lines:
            a, b = values[first % len(values)], values[second % len(values)]
            layer = self.layers[which % len(self.layers)]
            if operation == "layer":
                values.append(layer(a))
            elif operation == "relu":
                values.append(torch.relu(a))
            elif operation == "relu_":
                values.append(a.relu_())
            elif operation == "add":
                values.append(a + b)
            elif operation == "add_":
                a.add_(b)
            elif operation == "view":
                values.append(a.view(a.shape))
            elif operation == "pool" and a.dim() == 4:
                values.append(nn.functional.max_pool2d(a, 3, 1, 1))
            elif operation == "part_add_":
                a[:1].add_(b[1:])
            elif operation == "part_layer_":
                a[1:].add_(layer(b[:1]))
        return [*values, values[-1]]


LINES = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), *(st.integers(0, 7) for _ in range(3))), min_size=3, max_size=9
)


def observed(layers: nn.ModuleList, lines: list[Line], x: torch.Tensor) -> nn.ModuleList:
    """The layers on 8 bits, each with the range of all that it reads."""
    ends = dict.fromkeys(layers, (0.0, 0.0))

    def watch(layer: nn.Module, args: Any) -> None:
        low, high = (end.item() for end in args[0].aminmax())
        ends[layer] = min(low, ends[layer][0]), max(high, ends[layer][1])

    handles = [layer.register_forward_pre_hook(watch) for layer in layers]
    Straight(layers, lines)(x)
    for handle in handles:
        handle.remove()
    return nn.ModuleList(Int8Layer(layer, activation_range(*ends[layer])) for layer in layers)


def assert_rewrite_keeps_values(
    model: nn.Module, x: torch.Tensor, rewrite: Callable[[torch.fx.GraphModule], None]
) -> Any:
    program = export_one(model, Case(name="forward", args=(x,)), None)
    before = program.module()(x.clone())
    program = functional(program)
    rewrite(program.graph_module)
    after = program.module()(x.clone())
    for old, new in zip(before, after, strict=True):
        assert old.dtype == new.dtype
        assert (new - old).norm() <= ROUNDING * old.norm() + 1e-6
    return program


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "convolution"])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(lines=LINES)
def test_shared_integers_leave_every_value_as_it_was(kind: str, lines: list[Line]) -> None:
    check_shared_integers(kind, lines)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["linear", "convolution"])
@settings(max_examples=300, deadline=None)
@given(lines=LINES)
def test_shared_integers_leave_every_value_as_it_was_at_length(kind: str, lines: list[Line]) -> None:
    check_shared_integers(kind, lines)


@torch.no_grad()
def check_shared_integers(kind: str, lines: list[Line]) -> None:
    torch.manual_seed(0)
    linear = kind == "linear"
    x = torch.randn((2, 5, 32) if linear else (2, 32, 6, 6))
    made = [nn.Linear(32, 32) if linear else nn.Conv2d(32, 32, 3, padding=1) for _ in range(2)]
    layers = observed(nn.ModuleList(made), lines, x)
    assert_rewrite_keeps_values(Straight(layers, lines), x, share_integers)


@pytest.mark.slow
@pytest.mark.skipif(bool(build.load_fault()), reason="the kernels are not built here")
@settings(max_examples=12, deadline=None, derandomize=True)
@given(lines=LINES)
def test_joined_layers_leave_every_value_as_it_was(lines: list[Line]) -> None:
    check_joined_layers(lines)


@pytest.mark.sweep
@pytest.mark.skipif(bool(build.load_fault()), reason="the kernels are not built here")
@settings(max_examples=300, deadline=None)
@given(lines=LINES)
def test_joined_layers_leave_every_value_as_it_was_at_length(lines: list[Line]) -> None:
    check_joined_layers(lines)


@torch.no_grad()
def check_joined_layers(lines: list[Line]) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(RowLinear(nn.Linear(32, 32)) for _ in range(2))
    assert_rewrite_keeps_values(Straight(layers, lines), torch.randn(2, 5, 32), fuse_layers)


@pytest.mark.skipif(bool(build.load_fault()), reason="the kernels are not built here")
def test_what_is_added_into_a_part_of_a_value_stays_in_the_graph() -> None:
    """An addition in place was once taken for one that makes a new value: of this model nothing but `ones` was left."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = RowLinear(nn.Linear(32, 32)), RowLinear(nn.Linear(32, 32))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            values = torch.ones(3, 2, 32)
            values[:, 0].add_(self.a(x))
            values.select(1, 1).add_(self.b(x + 1))
            return [values]

    program = assert_rewrite_keeps_values(Parts(), torch.randn(3, 32), fuse_layers)
    assert sum("linear_w8a8_fused" in str(node.target) for node in program.graph.nodes) == 2
