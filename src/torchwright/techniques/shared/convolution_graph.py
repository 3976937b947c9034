"""Packed convolutions of an exported graph joined with what follows them: a pass over a functional one, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchwright.kernels.cpu import build
from torchwright.techniques.shared.encoder_graph import drop_copies, make_call, only_user, same_kind, tidy

aten = torch.ops.aten
ACTIVATIONS = {
    aten.relu.default: "relu",
    aten.relu6.default: "relu6",
    aten.silu.default: "silu",
    aten.sigmoid.default: "sigmoid",
    aten.hardswish.default: "hardswish",
    aten.hardsigmoid.default: "hardsigmoid",
}
SIX = (0, 6)
"""Bounds of a `hardtanh` that is a ReLU6."""


def fuse_convolutions(graph_module: GraphModule) -> None:
    """Join packed convolutions with the activation or the addition after them; values stay, within rounding."""
    if build.load_fault() is not None:
        return
    ops: Any = torch.ops.torchwright
    place = {ops.conv_dense.default: 7, ops.conv_depthwise.default: 6}
    for node in list(graph_module.graph.nodes):
        if node.target in place:
            drop_copies(node)
            _take_activation(node, place[node.target])
            if node.target is ops.conv_dense.default:
                _take_residual(node)
    tidy(graph_module)


def _take_activation(layer: Any, place: int) -> None:
    after = only_user(layer)
    if after is None or after.args[0] is not layer:
        return
    name = ACTIVATIONS.get(after.target)
    if after.target is aten.hardtanh.default and after.args[1:] == SIX:
        name = "relu6"
    if name:
        layer.update_arg(place, name)
        after.replace_all_uses_with(layer)
        after.graph.erase_node(after)


def _take_residual(layer: Any) -> None:
    """The kernel adds after the activation."""
    after = only_user(layer)
    if after is None or after.target is not aten.add.Tensor or len(after.args) != 2 or after.kwargs:
        return
    other = after.args[1] if after.args[0] is layer else after.args[0]
    if not isinstance(other, Node) or other is layer or not same_kind(other, layer):
        return
    with after.graph.inserting_before(after):
        fused = make_call(layer.target, *layer.args[:-1], other)
    after.replace_all_uses_with(fused)
    after.graph.erase_node(after)
    layer.graph.erase_node(layer)
