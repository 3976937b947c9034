"""Layers of an exported graph joined with what follows them: steps of passes over a functional graph, each in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

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


def drop_copies(layer: Node) -> None:
    """Treat plain copies of a layer's output as that output: a functional graph has one where a dropout did nothing."""
    for user in list(layer.users):
        if user.target is aten.clone.default and not user.kwargs:
            user.replace_all_uses_with(layer)
            layer.graph.erase_node(user)


def take_activation(layer: Any, place: int) -> None:
    """Have a layer apply the activation that alone reads it; `place` is that of its argument that names one."""
    after = only_user(layer)
    if after is None or after.args[:1] != (layer,) or layer.args[place] != "none":
        return
    name = _activation(after)
    if name:
        layer.update_arg(place, name)
        after.replace_all_uses_with(layer)
        after.graph.erase_node(after)


def take_residual(layer: Any) -> None:
    """Have a layer, whose last argument is what it adds after its activation, add what alone reads it adds."""
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


def _activation(node: Any) -> str | None:
    if node.target is aten.gelu.default:
        return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
    if node.target is aten.hardtanh.default and node.args[1:] == SIX:
        return "relu6"
    return ACTIVATIONS.get(node.target)


def same_kind(one: Node, other: Node) -> bool:
    """Check whether the values of two nodes have one shape and dtype."""
    a, b = one.meta["val"], other.meta["val"]
    return a.shape == b.shape and a.dtype == b.dtype


def only_user(node: Node) -> Any:
    """The one reader of a node, or None."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def make_call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A new node at the graph's place of insertion, with the shape and type of its value."""
    nodes = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Node)]
    node = nodes[0].graph.call_function(function, args, kwargs)
    values = map_arg(args, lambda arg: arg.meta["val"])
    with nodes[0].meta["val"].fake_mode:
        node.meta["val"] = function(*values, **kwargs)
    return node


def tidy(graph_module: GraphModule) -> None:
    """Leave out what nobody reads any more, and check what is left."""
    graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    graph_module.recompile()
