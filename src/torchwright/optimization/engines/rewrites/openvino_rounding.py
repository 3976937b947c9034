# pyright: basic, reportMissingImports=false
"""Round the weights of an 8-bit OpenVINO graph again, for the least error of each layer's output (`rounding.py`).

NNCF rounds weights to the nearest. Its own bias correction passes over depthwise convolutions, layers without bias, and
every layer that has one channel of a small bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchwright.core.quiet import import_openvino, openvino_core
from torchwright.optimization.techniques.shared.rounding import (
    Moments,
    convolution_patches,
    linear_patches,
    mean_error,
    round_by,
)

CONVOLUTIONS = ("Convolution", "GroupConvolution")
LEVELS = 255
"""Steps of symmetric 8-bit weights, -127 to 127."""
AT_ONCE = 2**28
"""Bytes of layers' inputs that are read in one pass of the model."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A product of a graph whose weight is a constant with fake quantization."""

    op: Any
    weight_GNK: torch.Tensor
    largest: int
    """Largest integer of a weight. NNCF gives some layers 7 bits, for processors whose sums of products overflow."""

    @property
    def convolves(self) -> bool:
        return self.op.get_type_name() in CONVOLUTIONS

    def patches(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layer multiplies by its weights: (groups, rows, K)."""
        if not self.convolves:
            return linear_patches(x)
        given = self.op.get_attributes()
        weight = self.op.input_value(1).get_shape()
        return convolution_patches(
            x,
            list(weight[-len(given["strides"]) :]),
            stride=given["strides"],
            padding=list(zip(given["pads_begin"], given["pads_end"], strict=True)),
            dilation=given["dilations"],
            groups=len(self.weight_GNK),
        )

    def replace_weight(self, integers_GNK: torch.Tensor, scale_GN: torch.Tensor) -> None:
        """Write new weights into the graph."""
        operators = _operators()
        shape = self.op.input_value(1).get_shape()
        wide = (integers_GNK * scale_GN[..., None]).flatten(0, 1)
        if self.convolves:
            leading = len(shape) - self.op.input_value(0).get_partial_shape().rank.get_length()
            channels = [*shape[: leading + 1], *[1] * (len(shape) - leading - 1)]
        elif self.op.get_attributes()["transpose_b"]:
            channels = [shape[0], 1]
        else:
            channels, wide = [1, shape[1]], wide.T
        end = operators.constant((LEVELS // 2 * scale_GN).reshape(channels).contiguous().numpy())
        start = operators.constant((-(LEVELS // 2) * scale_GN).reshape(channels).contiguous().numpy())
        value = operators.constant(wide.reshape(list(shape)).contiguous().numpy())
        narrow = operators.fake_quantize(value, start, end, start, end, LEVELS)
        self.op.input(1).replace_source_output(narrow.output(0))


def round_weights(quantized: Any, calls: Sequence[Sequence[Any]], at_once: int = AT_ONCE) -> int:
    """Round the weights of `quantized` again in place, and correct its biases; return the number of changed layers.

    `calls` are the calibration calls, a list of arrays each. Layers' inputs are those of the graph without its fake
    quantization; a layer whose inputs hold NaN or infinity is left alone. One pass reads `at_once` bytes of inputs.
    """
    quantized.validate_nodes_and_infer_types()
    layers = {op.get_friendly_name(): layer for op in quantized.get_ordered_ops() if (layer := _layer(op))}
    if not layers:
        return 0
    wide = _without_fake_quantization(quantized)
    changed = 0
    for some in _at_once(wide, layers, at_once):
        for name, moments in _moments(wide, {name: layers[name] for name in some}, calls).items():
            if not moments.mean_GK.isfinite().all():
                continue
            layer = layers[name]
            integers, scale = round_by(layer.weight_GNK, moments, layer.largest)
            layer.replace_weight(integers, scale)
            _add_to_output(layer, mean_error(layer.weight_GNK, integers, scale, moments).numpy())
            changed += 1
    return changed


def _layer(op: Any) -> Layer | None:
    """Return a product with a constant weight of symmetric 8-bit steps; None for other operators."""
    kind = op.get_type_name()
    if kind not in (*CONVOLUTIONS, "MatMul"):
        return None
    narrow = op.input_value(1).get_node()
    if narrow.get_type_name() != "FakeQuantize" or narrow.get_attributes()["levels"] != LEVELS:
        return None
    source, high = narrow.input_value(0).get_node(), narrow.input_value(2).get_node()
    if {source.get_type_name(), high.get_type_name()} != {"Constant"}:
        return None
    weight, attributes = torch.from_numpy(source.data.copy()).float(), op.get_attributes()
    if kind == "MatMul":
        if weight.dim() != 2 or attributes["transpose_a"]:
            return None
        weight_GNK = (weight if attributes["transpose_b"] else weight.T)[None]
    elif attributes["auto_pad"].lower() not in ("explicit", "valid"):
        return None
    else:
        weight_GNK = weight.flatten(1)[None] if kind == "Convolution" else weight.flatten(2)
    seven = high.data.max() > 1.5 * weight.abs().max().item()
    return Layer(op=op, weight_GNK=weight_GNK.contiguous(), largest=63 if seven else 127)


def _without_fake_quantization(quantized: Any) -> Any:
    """Return a copy of the graph that computes in floating point."""
    wide = quantized.clone()
    for op in wide.get_ordered_ops():
        if op.get_type_name() == "FakeQuantize":
            for reader in list(op.output(0).get_target_inputs()):
                reader.replace_source_output(op.input_value(0))
    return wide


def _at_once(wide: Any, layers: dict[str, Layer], most: int) -> Iterator[list[str]]:
    """Yield names of layers whose inputs are read in one pass."""
    some: list[str] = []
    total = 0
    for op in wide.get_ordered_ops():
        if op.get_friendly_name() not in layers:
            continue
        shape = op.input_value(0).get_partial_shape()
        size = 4 * torch.Size(shape.get_min_shape()).numel()
        if some and total + size > most:
            yield some
            some, total = [], 0
        some.append(op.get_friendly_name())
        total += size
    yield some


def _moments(wide: Any, layers: dict[str, Layer], calls: Sequence[Sequence[Any]]) -> dict[str, Moments]:
    """Return the moments of these layers' inputs over all calls."""
    operators = _operators()
    ops = [op for op in wide.get_ordered_ops() if op.get_friendly_name() in layers]
    make: Any = import_openvino().Model  # whose stub knows another class of models
    model = make([operators.result(op.input_value(0)) for op in ops], wide.get_parameters(), "part")
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    request = openvino_core().compile_model(model, "CPU", settings).create_infer_request()
    names = [op.get_friendly_name() for op in ops]
    found = {name: Moments(convolves=layers[name].convolves) for name in names}
    for call in calls:
        request.infer(list(call))
        for place, (name, moments) in enumerate(found.items()):
            x = torch.from_numpy(request.get_output_tensor(place).data)
            moments.add(layers[name].patches(x))
    return found


def _add_to_output(layer: Layer, shift: Any) -> None:
    """Add a number for each channel to a product's output, in its bias if a constant is added to it alone."""
    operators, op = _operators(), layer.op
    rank = op.get_output_partial_shape(0).rank.get_length()
    shape = [1] * rank
    shape[1 if layer.convolves else rank - 1] = -1
    shift = shift.reshape(shape)
    readers = list(op.output(0).get_target_inputs())
    if len(readers) == 1 and readers[0].get_node().get_type_name() == "Add":
        bias = readers[0].get_node().input(1 - readers[0].get_index())
        source = bias.get_source_output().get_node()
        if source.get_type_name() == "Constant" and source.data.size == shift.size:
            moved = source.data.reshape(shift.shape) + shift
            bias.replace_source_output(operators.constant(moved.reshape(source.data.shape)).output(0))
            return
    moved = operators.add(op.output(0), operators.constant(shift))
    for reader in readers:
        reader.replace_source_output(moved.output(0))


def _operators() -> Any:
    from openvino import opset15

    return opset15
