"""The computation of a batch norm's subclass after its normalization, as a separate module."""

from __future__ import annotations

import inspect
from typing import Any

from torch import fx, nn
from torch.nn import functional as F

from torchwright.core.layer_types import computes_as

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
OWN = ("running_mean", "running_var", "weight", "bias")
READS_NO_VALUES = frozenset({"ndim", "shape", "dtype", "device"})
"""Attributes of the input that are the same without the normalization."""


def rest_of_norm(norm: Any) -> nn.Module | None:
    """Return the module that takes a batch norm's place once its normalization is part of the layer before it.

    An identity for torch's own classes. None for a subclass whose forward torch.fx cannot trace, or does not begin
    with F.batch_norm of the input by the module's own statistics.
    """
    if computes_as(norm, NORMS):
        return nn.Identity()
    try:
        traced = fx.symbolic_trace(norm)
    except Exception:  # whatever the forward raises for torch.fx's stand-ins of tensors
        return None
    graph = traced.graph
    calls = [node for node in graph.nodes if node.target is F.batch_norm]
    if len(calls) != 1 or not _begins_with(norm, graph, calls[0]):
        return None
    calls[0].replace_all_uses_with(next(iter(graph.nodes)))
    graph.erase_node(calls[0])
    graph.eliminate_dead_code()
    traced.recompile()
    return fx.GraphModule(traced, graph, "RestOfNorm")  # with what the graph still reads alone


def _begins_with(norm: Any, graph: fx.Graph, call: fx.Node) -> bool:
    """Check that `call` normalizes the first input by the norm's own statistics, and is all that reads its values."""
    given = inspect.signature(F.batch_norm).bind(*call.args, **call.kwargs)
    given.apply_defaults()
    x, settings = next(iter(graph.nodes)), given.arguments
    others = [user for user in x.users if user is not call]
    if any(user.target is not getattr or user.args[1] not in READS_NO_VALUES for user in others):
        return False
    own = all(_is_own(norm, name, settings[name]) for name in OWN)
    return settings["input"] is x and own and not settings["training"] and settings["eps"] == norm.eps


def _is_own(norm: Any, name: str, value: Any) -> bool:
    if isinstance(value, fx.Node):
        return value.op == "get_attr" and value.target == name
    return value is None and getattr(norm, name) is None
