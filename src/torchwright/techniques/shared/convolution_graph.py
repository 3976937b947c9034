"""Packed convolutions of an exported graph joined with what follows them: a pass over a functional one, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from torchwright.kernels.cpu import build
from torchwright.techniques.shared.joining import drop_copies, take_activation, take_residual, tidy


def fuse_convolutions(graph_module: GraphModule) -> None:
    """Join packed convolutions with the activation or the addition after them; values stay, within rounding."""
    if build.load_fault() is not None:
        return
    ops: Any = torch.ops.torchwright
    place = {ops.conv_dense.default: 7, ops.conv_depthwise.default: 6}
    for node in list(graph_module.graph.nodes):
        if node.target in place:
            drop_copies(node)
            take_activation(node, place[node.target])
            if node.target is ops.conv_dense.default:
                take_residual(node)
    tidy(graph_module)
