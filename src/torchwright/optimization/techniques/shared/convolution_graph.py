"""Packed convolutions of an exported graph joined with what follows them: a pass over a functional one, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchwright.hardware.kernels.cpu import build
from torchwright.optimization.techniques.shared.joining import (
    drop_copies,
    make_call,
    only_user,
    take_activation,
    take_residual,
    tidy,
)

aten = torch.ops.aten
INPUT, WINDOW, STRIDE = 0, 3, 4
"""Places of a layer's arguments; the scale of its inputs comes last."""


def fuse_convolutions(graph_module: GraphModule) -> None:
    """Join packed convolutions with the activation, the addition or the mean after them and the scale before them.

    Values stay, within rounding.
    """
    if build.load_fault() is not None:
        return
    ops: Any = torch.ops.torchwright
    dense, place = ops.conv_dense.default, {ops.conv_dense.default: 7, ops.conv_depthwise.default: 6}
    for node in list(graph_module.graph.nodes):
        if node.target in place:
            drop_copies(node)
            take_activation(node, place[node.target])
            if node.target is dense:
                take_residual(node)
    for node in [node for node in graph_module.graph.nodes if node.target is dense]:
        _take_scale(node)
    for node in list(graph_module.graph.nodes):
        if _is_mean(node) and node.args[0].target in place:
            _replace_mean(node)
    tidy(graph_module)


def _is_mean(node: Node) -> bool:
    """Check whether a node is the mean over all pixels of each image."""
    if node.target is aten.adaptive_avg_pool2d.default:
        return list(node.args[1]) == [1, 1]  # type: ignore[arg-type]
    if node.target is not aten.mean.dim or node.kwargs:
        return False
    return sorted(axis % 4 for axis in node.args[1]) == [2, 3]  # type: ignore[union-attr]


def _replace_mean(node: Any) -> None:
    """Ours passes over an image once; Inductor's once for each sixteen channels."""
    kept = node.target is not aten.mean.dim or node.args[2:] == (True,)
    with node.graph.inserting_before(node):
        mean = make_call(torch.ops.torchwright.image_mean.default, node.args[0])
        node.replace_all_uses_with(mean if kept else make_call(aten.squeeze.dims, mean, [2, 3]))
    node.graph.erase_node(node)


def _take_scale(layer: Any) -> None:
    """Squeeze and excite: the channels of each image multiplied by numbers of their own."""
    before = layer.args[INPUT]
    while before.target is aten.clone.default and only_user(before) is layer:
        before = before.args[0]
    if before.target is not aten.mul.Tensor or only_user(before) is None or before.kwargs:
        return
    if list(layer.args[WINDOW]) != [1, 1] or list(layer.args[STRIDE]) != [1, 1]:
        return
    for x, scale in (before.args, reversed(before.args)):
        if _is_scale(scale, x):
            with layer.graph.inserting_before(layer):
                if scale.meta["val"].dtype != torch.float32:
                    scale = make_call(aten.to.dtype, scale, torch.float32)
                fused = make_call(layer.target, x, *layer.args[1:], scale)
            layer.replace_all_uses_with(fused)
            layer.graph.erase_node(layer)
            return


def _is_scale(scale: Any, x: Any) -> bool:
    """Check whether one number per channel of each image multiplies x, in the same dtype."""
    if not isinstance(scale, Node) or not isinstance(x, Node):
        return False
    one, all_ = scale.meta["val"], x.meta["val"]
    return all_.dim() == 4 and one.dtype == all_.dtype and one.shape == (*all_.shape[:2], 1, 1)
