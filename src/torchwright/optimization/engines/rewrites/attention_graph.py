# pyright: basic
"""Attention of an exported graph in forms that other libraries compute as PyTorch does."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from torchwright.optimization.techniques.shared.joining import make_call

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
MASK = 3
"""Its place among the arguments."""


def attention_as_in_pytorch(program: ExportedProgram) -> None:
    """Rewrite, in place, attention that OpenVINO 2026.4 or ONNX Runtime 1.32 would answer differently.

    A query whose mask hides every key (left padding before a causal sequence) gives zeros in PyTorch and an average in
    ONNX Runtime. OpenVINO gives NaN, which the next layer spreads to the whole sequence. A single head with
    an explicit scale loses its transposes in OpenVINO.
    """
    graph = program.graph_module.graph
    given = varying(program)
    opened: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    nodes: list[Any] = graph.find_nodes(op="call_function", target=ATTENTION)
    for node in nodes:
        mask = node.args[MASK] if len(node.args) > MASK else node.kwargs.get("attn_mask")
        if mask in given:  # what a constant one makes, the examples have shown
            if mask not in opened:  # layers share it
                with graph.inserting_before(node):
                    opened[mask] = _opened(mask)
            _blind_rows_are_zeros(node, *opened[mask])
        shape = node.args[0].meta["val"].shape
        if node.kwargs.get("scale") is not None and len(shape) == 4 and shape[1] == 1:
            _default_scale(node)
    program.graph_module.recompile()


def varying(program: ExportedProgram) -> set[fx.Node]:
    """Return the nodes that are computed from the call's tensors."""
    inputs = {
        spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT
    }
    found: set[fx.Node] = set()
    for node in program.graph_module.graph.nodes:
        if node.name in inputs if node.op == "placeholder" else not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _opened(mask: Any) -> tuple[fx.Node, fx.Node]:
    """The mask with queries that see no key seeing all, and which queries see one."""
    aten = torch.ops.aten
    if mask.meta["val"].dtype == torch.bool:
        sees = make_call(aten.any.dim, mask, -1, True)
        return make_call(aten.logical_or.default, mask, make_call(aten.logical_not.default, sees)), sees
    sees = make_call(aten.any.dim, make_call(aten.gt.Scalar, mask, float("-inf")), -1, True)
    return make_call(aten.where.ScalarOther, sees, mask, 0.0), sees


def _blind_rows_are_zeros(node: Any, mask: fx.Node, sees: fx.Node) -> None:
    if len(node.args) > MASK:
        node.update_arg(MASK, mask)
    else:
        node.update_kwarg("attn_mask", mask)
    readers = list(node.users)
    with node.graph.inserting_after(node):
        factor = make_call(torch.ops.aten.to.dtype, sees, node.meta["val"].dtype)
    with node.graph.inserting_after(factor):
        kept = make_call(torch.ops.aten.mul.Tensor, node, factor)
    for reader in readers:
        reader.replace_input_with(node, kept)


def _default_scale(node: Any) -> None:
    """Scale the queries instead."""
    query, scale = node.args[0], node.kwargs["scale"]
    with node.graph.inserting_before(node):
        node.update_arg(
            0, make_call(torch.ops.aten.mul.Tensor, query, scale * query.meta["val"].shape[-1] ** 0.5)
        )
    node.kwargs = {name: value for name, value in node.kwargs.items() if name != "scale"}
