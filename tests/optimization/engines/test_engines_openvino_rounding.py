"""Weights of 8-bit OpenVINO graphs rounded again, beside outputs of torch's own layers."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchwright.core.quiet import import_openvino, openvino_core

pytest.importorskip("openvino", reason="its graphs")

from torchwright.optimization.engines.rewrites.openvino_rounding import CONVOLUTIONS, round_weights

PRODUCTS = (*CONVOLUTIONS, "MatMul")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def graph_of(module: nn.Module, x: torch.Tensor) -> Any:
    program = torch.export.export(module.eval(), (x,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own, about torch's containers
        return import_openvino().convert_model(program)


def quantized(model: Any, largest: int = 127, levels: int = 255) -> Any:
    """A copy of the graph with fake quantization of weights, per-channel, as NNCF writes it."""
    from openvino import opset15

    copy = model.clone()
    for op in copy.get_ordered_ops():
        if op.get_type_name() not in PRODUCTS:
            continue
        weight = op.input_value(1).get_node().data
        kernel = (
            1 if op.get_type_name() == "MatMul" else weight.ndim - (2 if "Group" in op.get_type_name() else 1)
        )
        ends = (
            np.abs(weight).max(tuple(range(weight.ndim - kernel, weight.ndim)), keepdims=True) * 127 / largest
        )
        narrow = opset15.fake_quantize(opset15.constant(weight), -ends, ends, -ends, ends, levels)
        op.input(1).replace_source_output(narrow.output(0))
    return copy


def run(model: Any, x: torch.Tensor) -> torch.Tensor:
    compiled = openvino_core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled([x.numpy()])[0].copy())


def weights_of(model: Any) -> list[Any]:
    """The numbers that products of the graph multiply by."""
    from openvino import opset15

    narrow = [op.input_value(1) for op in model.get_ordered_ops() if op.get_type_name() in PRODUCTS]
    part = import_openvino().Model([opset15.result(each) for each in narrow], [], "weights")
    found = openvino_core().compile_model(part, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([])
    return [found[place].copy() for place in range(len(narrow))]


LAYERS = [
    pytest.param(nn.Conv2d(6, 8, 3, stride=2, padding=1), (4, 6, 9, 9), 1, 127, id="convolution"),
    pytest.param(nn.Conv2d(6, 6, 3, groups=6, bias=False), (4, 6, 9, 9), 1, 127, id="depthwise, no bias"),
    pytest.param(nn.Conv2d(6, 8, 3, groups=2, dilation=2), (4, 6, 9, 9), 1, 63, id="groups"),
    pytest.param(nn.Conv1d(6, 8, 3, padding=1), (4, 6, 9), 1, 127, id="one dimension"),
    pytest.param(nn.Linear(6, 5), (4, 7, 6), 2, 63, id="linear"),
    pytest.param(nn.Linear(6, 5, bias=False), (4, 6), 1, 127, id="linear, no bias"),
]


@pytest.mark.parametrize(("layer", "shape", "channels", "largest"), LAYERS)
def test_a_layer_keeps_its_mean_and_loses_no_more(
    layer: nn.Module, shape: tuple[int, ...], channels: int, largest: int
) -> None:
    """Beside rounding to the nearest, on the calibration calls."""
    calls = [torch.rand(shape) + torch.rand(shape[0], *[1] * (len(shape) - 1)) for _ in range(2)]
    narrow = quantized(graph_of(layer, calls[0]), largest)
    others = [axis for axis in range(len(shape)) if axis != channels]
    with torch.no_grad():
        exact = torch.cat([layer(x) for x in calls])
    before = torch.cat([run(narrow, x) for x in calls]) - exact
    assert round_weights(narrow, [[x.numpy()] for x in calls]) == 1
    after = torch.cat([run(narrow, x) for x in calls]) - exact
    assert before.mean(others).abs().max() > 1e-4
    assert after.mean(others).abs().max() < 1e-5
    spread = [error.var(others, unbiased=False) for error in (before, after)]
    assert (spread[1] <= spread[0] * 1.001 + 1e-10).all()
    (weight,) = weights_of(narrow)
    for row in weight.reshape(len(exact.movedim(channels, 0)), -1):
        assert np.abs(row).max() <= np.abs(row)[np.abs(row) > 0].min() * largest * 1.001


class Twice(nn.Module):
    """Two convolutions of one weight and one bias; what the first gives is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = nn.functional.conv2d(x, self.layer.weight, padding=1)
        return self.layer(first.relu()) + first


def test_what_is_used_twice_is_rounded_for_each_use() -> None:
    x, module = torch.rand(4, 6, 9, 9), Twice()
    narrow = quantized(graph_of(module, x))
    assert round_weights(narrow, [[x.numpy()]], at_once=1) == 2  # one layer in each pass
    first, second = map(torch.from_numpy, weights_of(narrow))
    convolution: Any = nn.functional.conv2d

    def corrected(x: torch.Tensor, exact: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        missing = convolution(exact, module.layer.weight - weight, padding=1).mean((0, 2, 3), keepdim=True)
        return convolution(x, weight, padding=1) + missing

    with torch.no_grad():
        exact = convolution(x, module.layer.weight, padding=1)
        one = corrected(x, x, first)
        two = corrected(one.relu(), exact.relu(), second) + module.layer.bias.view(1, -1, 1, 1)
    assert (run(narrow, x) - one - two).abs().max() < 1e-4


def test_inputs_that_were_scaled_are_those_that_count() -> None:
    """As SmoothQuant does: a layer's input is divided, and its weight multiplied, by the same numbers."""
    from openvino import opset15

    layer, x, scales = nn.Linear(6, 5), torch.rand(40, 6), np.linspace(0.5, 3, 6, dtype=np.float32)
    model = graph_of(layer, x)
    for op in model.get_ordered_ops():
        if op.get_type_name() == "MatMul":
            weight = op.input_value(1).get_node().data * scales
            smaller = opset15.multiply(op.input_value(0), opset15.constant(1 / scales[None]))
            op.input(0).replace_source_output(smaller.output(0))
            op.input(1).replace_source_output(opset15.constant(weight).output(0))
    model.validate_nodes_and_infer_types()
    narrow = quantized(model)
    assert round_weights(narrow, [[x.numpy()]]) == 1
    with torch.no_grad():
        error = run(narrow, x) - layer(x)
    assert error.mean(0).abs().max() < 1e-5
    assert error.abs().max() < 0.02


@pytest.mark.parametrize("case", ["float", "other levels", "nan"])
def test_other_layers_are_left_alone(case: str) -> None:
    x = torch.rand(4, 6)
    model = graph_of(nn.Linear(6, 5), x)
    narrow = (
        model.clone() if case == "float" else quantized(model, levels=16 if case == "other levels" else 255)
    )
    before = weights_of(narrow)
    call = x * torch.nan if case == "nan" else x
    assert round_weights(narrow, [[call.numpy()]]) == 0
    assert np.array_equal(before[0], weights_of(narrow)[0])


def test_a_graph_without_layers_is_left_alone() -> None:
    x = torch.rand(4, 6)
    assert round_weights(graph_of(nn.ReLU(), x), [[x.numpy()]]) == 0
