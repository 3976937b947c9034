# pyright: basic, reportAttributeAccessIssue=false
"""The smallest and largest of 8-bit integers, which Inductor's vectors get wrong on a CPU (pytorch#191499)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from torchwright.optimization.techniques.shared.joining import make_call

aten = torch.ops.aten
SETTING = "post_grad_custom_pre_pass"
"""Inductor's setting: passes over the graph that is about to be lowered, for torch.compile and AOTInductor alike."""
BYTES = frozenset([torch.int8, torch.uint8])
VALUES = frozenset([aten.amin.default, aten.amax.default, aten.min.default, aten.max.default])
PLACES = frozenset([aten.argmin.default, aten.argmax.default])
BOTH = frozenset([aten.min.dim, aten.max.dim])
"""Operators that return the values and their places."""


class WideReductions(CustomGraphPass):
    """Reduces 8-bit integers as 32-bit ones, before the user's own passes."""

    def __init__(self, others: Sequence[Any] = ()) -> None:
        self.others = others

    def __call__(self, graph: Graph) -> None:
        widen_reductions(graph)
        for other in self.others:
            other(graph)

    def uuid(self) -> Any:
        """The pass's part in the key of Inductor's cache; None, if a pass of the user's has none, turns caching off."""
        known = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.others]
        return None if None in known else ("torchwright wide reductions 1", *known)


def exact_reductions() -> dict[str, Any]:
    """Return the setting of Inductor with which it reduces 8-bit integers correctly, for `config.patch`."""
    own = getattr(torch._inductor.config, SETTING)
    if own is None or isinstance(own, WideReductions):
        return {SETTING: WideReductions(own.others if own else ())}
    return {SETTING: WideReductions(own if isinstance(own, Sequence) else [own])}


def widen_reductions(graph: Graph) -> None:
    """Replace, in place, each reduction of 8-bit integers by one of 32-bit integers.

    Inductor loads 16 bytes into a vector of 32 or 64 and then reduces it whole: with zeros where nothing was loaded,
    the least of positive numbers was 0, and its place -1.
    """
    for node in [node for node in graph.nodes if node.target in VALUES | PLACES | BOTH]:
        source = node.args[0]
        dtype = source.meta["val"].dtype
        if dtype not in BYTES:
            continue
        with graph.inserting_before(node):
            node.args = (_cast(source, torch.int32), *node.args[1:])
        if node.target in VALUES:
            _narrow(node, dtype)
        elif node.target in BOTH:
            values, places = node.meta["val"]
            node.meta["val"] = (values.to(torch.int32), places)
            for part in [user for user in node.users if user.args[1] == 0]:
                _narrow(part, dtype)


def _narrow(node: Node, dtype: torch.dtype) -> None:
    """Give the readers of `node`, which is of 32 bits now, its value as the type that they expect."""
    node.meta["val"] = node.meta["val"].to(torch.int32)
    with node.graph.inserting_after(node):
        narrow = _cast(node, dtype)
    node.replace_all_uses_with(narrow, delete_user_cb=lambda user: user is not narrow)


def _cast(node: Node, dtype: torch.dtype) -> Node:
    return make_call(torch.ops.prims.convert_element_type.default, node, dtype)
