# pyright: basic, reportMissingImports=false
"""8-bit integers for a delegate by PT2E, and the layer at which they do not suffice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from torchwright.core import nested
from torchwright.core.errors import RefusedTechnique, WorkloadError
from torchwright.exporter.calibration import calibrating
from torchwright.exporter.verification.locate import Parting
from torchwright.exporter.verification.reference import (
    free_dims,
    line_of,
    module_of,
    node_values,
    operator_of,
)
from torchwright.workloads.accuracy import relative_error

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from torchwright.optimization.engines.dispatch.spec import CallSpec
    from torchwright.optimization.techniques.base import Target


def quantized(
    program: ExportedProgram, spec: CallSpec, target: Target, quantizer: Any, allowed: float
) -> tuple[ExportedProgram, Parting | None]:
    """Return per-channel 8-bit weights, and activations with ranges from the workload's calibration calls.

    The second result is the first layer that the rounding throws off by more than `allowed`. A delegate does not show
    its intermediate values, and rounds as its graph does.
    """
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    prepared = prepare_pt2e(program.module(check_guards=False), quantizer)
    _keep_whole(prepared)
    example: Any = program.example_inputs
    with torch.no_grad():
        cases = calibrating(target, spec)
        for case in cases:
            prepared(*case.args, **case.kwargs)
        flat = nested.leaves((cases[0].args, cases[0].kwargs))
        exact = _by_name(node_values(prepared, flat))
        converted = convert_pt2e(prepared)
        if not any("quantize_per" in str(node.target) for node in converted.graph.nodes):
            raise RefusedTechnique(
                "8 bits change nothing of this model: the delegate's quantizer knows none of its operators",
                found=", ".join(
                    sorted(
                        {operator_of(node) for node in converted.graph.nodes if node.op == "call_function"}
                    )
                ),
                next="leave the precision out for float32",
            )
        parting = _first(exact, node_values(converted, flat), allowed)
        args, kwargs = nested.map_tensors(torch.clone, example)
        made = torch.export.export(
            converted, args, kwargs, dynamic_shapes=free_dims(spec, nested.leaves((args, kwargs)))
        )
    return made, parting


def _keep_whole(prepared: fx.GraphModule) -> None:
    """Restore the integers that the quantizer turned into float32: numbers next to tensors, including those of
    positions.
    """
    for node in prepared.graph.nodes:
        if node.op != "get_attr" or not str(node.target).startswith("_tensor_constant"):
            continue
        results = [user.meta["val"] for user in node.users if isinstance(user.meta.get("val"), torch.Tensor)]
        constant = getattr(prepared, node.target)
        whole = constant.is_floating_point() and bool((constant == constant.long()).all())
        if whole and results and not any(value.is_floating_point() for value in results):
            setattr(prepared, node.target, constant.long())


def _by_name(values: Mapping[fx.Node, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {node.name: value for node, value in values.items()}


def _first(
    exact: Mapping[str, torch.Tensor], rounded: Mapping[fx.Node, torch.Tensor], allowed: float
) -> Parting | None:
    """Return the operators that both graphs have, by name: batch norms are folded into convolutions in both."""
    before = 0.0
    for node, value in rounded.items():
        if not operator_of(node).startswith("aten.") or node.name not in exact:
            continue
        try:
            error = relative_error([exact[node.name]], [value]).value
        except WorkloadError:  # NaN, or of another shape
            error = float("inf")
        if error > allowed:
            return Parting(
                module=module_of(node),
                operator=operator_of(node),
                line=line_of(node),
                error=error,
                before=before,
            )
        before = max(before, error)
    return None
