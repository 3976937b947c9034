"""Complex buffers of an exported graph as real ones, for libraries whose constants are real."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind


def real_constants(program: ExportedProgram) -> None:
    """Replace complex buffers and constants that are read as pairs alone by these pairs, their real views."""
    graph = program.graph_module.graph
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        if spec.target is None:
            continue
        held = program.state_dict if spec.kind is InputKind.BUFFER and spec.persistent else program.constants
        value = held.get(spec.target)
        if not isinstance(value, torch.Tensor) or not value.is_complex():
            continue
        placeholder = placeholders[spec.arg.name]
        readers = list(placeholder.users)
        if any(node.target is not torch.ops.aten.view_as_real.default for node in readers):
            continue
        held[spec.target] = torch.view_as_real(value.resolve_conj()).contiguous()
        for node in readers:
            placeholder.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(placeholder)
            graph.erase_node(node)
    program.graph_module.recompile()
