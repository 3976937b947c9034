# pyright: basic, reportMissingImports=false
"""Bias correction: take from an 8-bit model's layers the mean of what rounding their weights adds to their outputs.

The error of an output channel is the product of the input with the weights' rounding errors. Its mean is that of a
constant, which a bias can take back at no cost. Where inputs are not centred (after a ReLU) the mean is most of the
error: a depthwise convolution's few weights do not average it out. (Nagel et al., "Data-Free Quantization Through
Weight Equalization and Bias Correction", 2019, the empirical variant.)

NNCF's own correction passes over depthwise convolutions, layers without bias, and every layer that has one channel of
a small bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchwright.core.quiet import import_openvino, openvino_core

CONVOLUTIONS = ("Convolution", "GroupConvolution")
PRODUCTS = (*CONVOLUTIONS, "MatMul")
"""Operators whose second input is the weight, and whose output has the channels on axis 1, of MatMul on the last."""
COARSEST = 63
"""Steps to the largest weight. NNCF gives some layers 7 bits, for processors whose sums of 8-bit products overflow."""


def correct_bias(model: Any, quantized: Any, calls: Sequence[Sequence[Any]]) -> int:
    """Correct the biases of `quantized` in place, by the inputs that layers have in `model`; return how many.

    `quantized` is `model` with rounded weights; operators of one name belong together. `calls` are the calibration
    calls, a list of arrays each. A layer whose weights differ by more than rounding is left alone: its inputs have
    been scaled as well.
    """
    import numpy as np

    layers = {op.get_friendly_name(): op for op in model.get_ordered_ops() if _weight(op) is not None}
    narrow = {
        name: op
        for op in quantized.get_ordered_ops()
        if (name := op.get_friendly_name()) in layers and op.get_type_name() in PRODUCTS
    }
    errors = _weight_errors(layers, narrow)
    if not errors:
        return 0
    shifts = _mean_products({name: layers[name] for name in errors}, errors, model, calls)
    finite = {name: shift for name, shift in shifts.items() if np.isfinite(shift).all()}
    for name, shift in finite.items():
        _add_to_output(narrow[name], shift)
    return len(finite)


def _weight(op: Any) -> Any:
    """Return the weight of a product, an array; None for other operators, and where it is computed."""
    if op.get_type_name() not in PRODUCTS:
        return None
    source = op.input_value(1).get_node()
    if source.get_type_name() != "Constant" or source.get_element_type().get_type_name() != "f32":
        return None
    if op.get_type_name() == "MatMul" and len(source.data.shape) != 2:
        return None
    return source.data


def _weight_errors(layers: dict[str, Any], narrow: dict[str, Any]) -> dict[str, Any]:
    """Return what is missing from each layer's weight, of those that are rounded to steps of 7 bits or more."""
    import numpy as np

    if not narrow:
        return {}
    operators = _operators()
    rounded = _compiled([operators.result(op.input_value(1)) for op in narrow.values()], [])([])
    found = {}
    for name, values in zip(narrow, rounded, strict=True):
        weight = _weight(layers[name])
        error = (weight - values).astype(np.float32)
        if error.any() and np.abs(error).max() <= 0.51 * np.abs(weight).max() / COARSEST:
            found[name] = error
    return found


def _mean_products(
    layers: dict[str, Any], errors: dict[str, Any], model: Any, calls: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """Return the mean over all calls and places of each layer's product with the missing part of its weight."""
    import numpy as np

    operators = _operators()
    results = []
    for name, op in layers.items():
        product = _product(op, errors[name])
        rank = op.get_output_partial_shape(0).rank.get_length()
        others = [place for place in range(rank) if place != _channels(op, rank)]
        axes = operators.constant(np.array(others, dtype=np.int64))
        results.append(operators.result(operators.reduce_mean(product, axes, False)))
    infer = _compiled(results, model.get_parameters())
    sums: list[Any] = [0.0] * len(results)
    for call in calls:
        sums = [total + mean for total, mean in zip(sums, infer(call), strict=True)]
    return {name: total / len(calls) for name, total in zip(layers, sums, strict=True)}


def _product(op: Any, weight: Any) -> Any:
    """Return the same product of the same input with another weight."""
    operators = _operators()
    kinds = {
        "Convolution": operators.convolution,
        "GroupConvolution": operators.group_convolution,
        "MatMul": operators.matmul,
    }
    return kinds[op.get_type_name()](op.input_value(0), operators.constant(weight), **op.get_attributes())


def _channels(op: Any, rank: int) -> int:
    """Return the axis of a product's output channels."""
    return 1 if op.get_type_name() in CONVOLUTIONS else rank - 1


def _add_to_output(op: Any, shift: Any) -> None:
    """Add a number for each channel to a product's output, in its bias if a constant is added to it alone."""
    operators = _operators()
    rank = op.get_output_partial_shape(0).rank.get_length()
    shape = [1] * rank
    shape[_channels(op, rank)] = -1
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


def _compiled(results: list[Any], parameters: Any) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a function of arrays that computes these results in float32."""
    make: Any = import_openvino().Model  # whose stub knows another class of models
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    request = openvino_core().compile_model(make(results, parameters, "part"), "CPU", settings)
    request = request.create_infer_request()

    def infer(arrays: Sequence[Any]) -> list[Any]:
        found = request.infer(list(arrays))
        return [found[place].copy() for place in range(len(results))]

    return infer


def _operators() -> Any:
    from openvino import opset15

    return opset15
