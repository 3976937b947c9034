"""Graph passes that packed layers and attention share: over a functional exported graph, each in place.

fuse_layers(graph)   layers of one input become one; activations and residual additions join the layer before them
drop_masks(graph)    attention masks that no input reaches and that hide nothing are left out
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchwright.hardware.kernels import pack
from torchwright.hardware.kernels.cpu import build
from torchwright.optimization.techniques.shared.joining import (
    drop_copies,
    make_call,
    take_activation,
    take_residual,
    tidy,
)

aten = torch.ops.aten
SHAPE_ONLY = (aten.ones_like.default, aten.zeros_like.default, aten.new_ones.default, aten.new_zeros.default)
"""Operators that read no values of their first argument."""
TENSORS, BIAS, FEATURES, ACTIVATION = range(1, 5), 4, 5, 6
"""Places of the layer's arguments: packed weight, scale, sums and bias, and what follows them."""
FOLDED = 1 << 24
"""Elements of the largest mask that is looked at."""


def fuse_layers(graph_module: GraphModule) -> None:
    """Join packed layers with their neighbours; values stay as they were, within rounding."""
    graph = graph_module.graph
    layer = _layer()
    for node in list(graph.nodes):
        if node.target is layer:
            drop_copies(node)
    for node in list(graph.nodes):
        _join_readers([user for user in node.users if user.target is layer and user.args[0] is node])
    for node in [node for node in graph.nodes if node.target is layer]:
        take_activation(node, ACTIVATION)
        take_residual(node)
    tidy(graph_module)


def drop_masks(graph_module: GraphModule) -> None:
    """Call attention without its mask where that is a constant and hides nothing."""
    constants: dict[Node, torch.Tensor | None] = {}
    for node in list(graph_module.graph.nodes):
        if node.target not in (aten.scaled_dot_product_attention.default, _attention()):
            continue
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if isinstance(mask, Node) and _hides_nothing(_constant(mask, constants)):
            if len(node.args) > 3:
                node.update_arg(3, None)
            else:
                node.update_kwarg("attn_mask", None)
    tidy(graph_module)


def _layer() -> Any:
    build.load_fault()
    return torch.ops.torchwright.linear_w8a8_fused.default


def _attention() -> Any:
    return torch.ops.torchwright.attention.default if build.load_fault() is None else None


def _join_readers(layers: Sequence[Any]) -> None:
    """One layer for several of the same input, whose outputs are its parts; those that fill whole panels."""
    whole = [
        node
        for node in layers
        if node.args[FEATURES] % pack.PANEL == 0 and node.args[ACTIVATION:] == ("none", None)
    ]
    whole = [node for node in whole if (node.args[BIAS] is None) == (whole[0].args[BIAS] is None)]
    if len(whole) < 2:
        return
    first, graph = whole[0], whole[0].graph
    with graph.inserting_before(first):
        tensors = [
            first.args[i] and make_call(aten.cat.default, [node.args[i] for node in whole]) for i in TENSORS
        ]
        features = [node.args[FEATURES] for node in whole]
        joined = make_call(first.target, first.args[0], *tensors, sum(features), "none", None)
        start = 0
        for node, count in zip(whole, features, strict=True):
            part = make_call(aten.slice.Tensor, joined, node.meta["val"].dim() - 1, start, start + count)
            node.replace_all_uses_with(part)
            start += count
    for node in whole:
        graph.erase_node(node)


def _constant(node: Any, known: dict[Node, torch.Tensor | None]) -> torch.Tensor | None:
    """Return a node's constant value, or None if it depends on an input or is too large to look at."""
    if not isinstance(node, Node):
        return None
    if node not in known:
        known[node] = _evaluate(node, known)
    return known[node]


def _evaluate(node: Any, known: dict[Node, torch.Tensor | None]) -> torch.Tensor | None:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.numel() > FOLDED:
        return None
    if any(not isinstance(size, int) for size in value.shape):
        return None
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return None
    arguments: dict[Node, torch.Tensor] = {}
    for before in node.all_input_nodes:
        if (
            node.target in SHAPE_ONLY
            and before is node.args[0]
            and isinstance(before.meta["val"], torch.Tensor)
        ):
            shape, dtype = before.meta["val"].shape, before.meta["val"].dtype
            if any(not isinstance(size, int) for size in shape):
                return None
            found: torch.Tensor | None = torch.zeros(tuple(shape), dtype=dtype)
        else:
            found = _constant(before, known)
        if found is None:
            return None
        arguments[before] = found
    args, kwargs = map_arg((node.args, node.kwargs), lambda arg: arguments[arg])
    result = node.target(*args, **kwargs)
    return result if isinstance(result, torch.Tensor) else None


def _hides_nothing(mask: torch.Tensor | None) -> bool:
    if mask is None:
        return False
    return bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())
