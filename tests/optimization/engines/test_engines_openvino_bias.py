"""The bias correction of 8-bit OpenVINO graphs, beside means of torch's own layers."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchwright.core.quiet import import_openvino, openvino_core

pytest.importorskip("openvino", reason="its graphs")

from torchwright.optimization.engines.rewrites.openvino_bias import PRODUCTS, correct_bias


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def graph_of(module: nn.Module, x: torch.Tensor) -> Any:
    program = torch.export.export(module.eval(), (x,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own, about torch's containers
        return import_openvino().convert_model(program)


def rounded(weight: Any, steps: int = 64) -> Any:
    scale = np.abs(weight).max() / steps
    return (np.round(weight / scale) * scale).astype(np.float32)


def narrow(model: Any, change: Any = rounded) -> Any:
    """A copy of the graph whose products have other weights."""
    from openvino import opset15

    copy = model.clone()
    for op in copy.get_ordered_ops():
        if op.get_type_name() in PRODUCTS:
            weight = op.input_value(1).get_node().data
            op.input(1).replace_source_output(opset15.constant(change(weight)).output(0))
    return copy


def run(model: Any, x: torch.Tensor) -> torch.Tensor:
    compiled = openvino_core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled([x.numpy()])[0].copy())


LAYERS = [
    pytest.param(nn.Conv2d(6, 8, 3, stride=2, padding=1), (4, 6, 9, 9), 1, id="convolution"),
    pytest.param(nn.Conv2d(6, 6, 3, groups=6, bias=False), (4, 6, 9, 9), 1, id="depthwise, no bias"),
    pytest.param(nn.Conv2d(6, 8, 3, groups=2, dilation=2), (4, 6, 9, 9), 1, id="groups"),
    pytest.param(nn.Conv1d(6, 8, 3), (4, 6, 9), 1, id="one dimension"),
    pytest.param(nn.Linear(6, 5), (4, 7, 6), 2, id="linear"),
    pytest.param(nn.Linear(6, 5, bias=False), (4, 6), 1, id="linear, no bias"),
]


@pytest.mark.parametrize(("layer", "shape", "channels"), LAYERS)
def test_a_layer_gets_back_the_mean_of_what_rounding_took(
    layer: nn.Module, shape: tuple[int, ...], channels: int
) -> None:
    calls = [torch.rand(shape), torch.rand(shape) + 1]
    model = graph_of(layer, calls[0])
    coarse = narrow(model)
    before = [run(coarse, x) for x in calls]
    assert correct_bias(model, coarse, [[x.numpy()] for x in calls]) == 1
    with torch.no_grad():
        missing = torch.cat([layer(x) - found for x, found in zip(calls, before, strict=True)])
    others = [axis for axis in range(missing.dim()) if axis != channels]
    mean = missing.mean(others, keepdim=True)
    assert mean.abs().max() > 1e-3
    for x, found in zip(calls, before, strict=True):
        assert (run(coarse, x) - found - mean).abs().max() < 1e-5


class Twice(nn.Module):
    """Two convolutions of one weight and one bias; what the first gives is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = nn.functional.conv2d(x, self.layer.weight, padding=1)
        return self.layer(first.relu()) + first


def test_what_is_used_twice_is_corrected_for_each_use() -> None:
    x, module = torch.rand(4, 6, 9, 9), Twice()
    model = graph_of(module, x)
    coarse = narrow(model)
    assert correct_bias(model, coarse, [[x.numpy()]]) == 2
    weight = torch.from_numpy(rounded(module.layer.weight.detach().numpy()))

    def convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, weight, padding=1)

    def missing(x: torch.Tensor) -> torch.Tensor:
        return convolution(x, module.layer.weight - weight).mean((0, 2, 3), keepdim=True)

    with torch.no_grad():
        exact = convolution(x, module.layer.weight)
        first = convolution(x, weight) + missing(x)
        second = (
            convolution(first.relu(), weight) + module.layer.bias.view(1, -1, 1, 1) + missing(exact.relu())
        )
    assert (run(coarse, x) - first - second).abs().max() < 1e-4


@pytest.mark.parametrize(
    "change", [lambda weight: weight, lambda weight: 2 * weight], ids=["not rounded", "scaled"]
)
def test_layers_that_were_not_only_rounded_are_left_alone(change: Any) -> None:
    x = torch.rand(4, 6)
    model = graph_of(nn.Linear(6, 5), x)
    other = narrow(model, change)
    before = run(other, x)
    assert correct_bias(model, other, [[x.numpy()]]) == 0
    assert torch.equal(run(other, x), before)


def test_a_graph_without_layers_is_left_alone() -> None:
    x = torch.rand(4, 6)
    model = graph_of(nn.ReLU(), x)
    assert correct_bias(model, model.clone(), [[x.numpy()]]) == 0
