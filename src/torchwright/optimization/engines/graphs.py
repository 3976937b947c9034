# pyright: basic, reportPrivateUsage=false
"""Exported graphs as calls, run operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx.graph import CodeGen

from torchwright.optimization.engines.call import spec_of
from torchwright.optimization.engines.results import call_result
from torchwright.optimization.engines.spec import CallSpec, NotHeld


class GraphCall:
    """An exported graph as Python calls its operators, without what `program.module()` does around them (40 µs)."""

    def __init__(
        self, program: ExportedProgram, spec: CallSpec, layouts: Sequence[tuple[int, ...] | None] = ()
    ) -> None:
        self.spec = spec
        module = program.module()
        module._forward_pre_hooks.clear()  # they look at types and sizes, as the door has
        module.graph.set_codegen(CodeGen())
        _keep_not_finite(module)
        module.recompile()
        self._forward: Callable[..., Any] = module.forward
        self._template = _inputs(program)
        self._places = [index for index, value in enumerate(self._template) if value is _TENSOR]
        out_spec = program.call_spec.out_spec
        assert out_spec is not None
        self.build = call_result(out_spec, layouts, spec.results)

    def run(self, tensors: list[torch.Tensor]) -> Any:
        arguments = list(self._template)
        for place, tensor in zip(self._places, tensors, strict=True):
            arguments[place] = tensor
        try:
            outputs = self._forward(*arguments)
        except AssertionError as error:  # a guard of torch.export's, over the sizes
            raise NotHeld(
                "the exported graph does not hold for this call", found=str(error).splitlines()[0][:200]
            ) from error
        return self.build(list(outputs))


def _keep_not_finite(module: torch.fx.GraphModule) -> None:
    """Let NaN and infinity pass through 8-bit integers."""
    if any(str(node.target).startswith("quantized_decomposed.") for node in module.graph.nodes):
        from torchwright.optimization.techniques.shared.int8_graph import (
            keep_not_finite,  # needs these operators
        )

        keep_not_finite(module)


class Later:
    """A call whose graph is read when it is first needed."""

    def __init__(self, spec: CallSpec, make: Callable[[], GraphCall]) -> None:
        self.spec, self._make = spec, make
        self._call: GraphCall | None = None

    def run(self, tensors: list[torch.Tensor]) -> Any:
        return self._made().run(tensors)

    def build(self, outputs: list[Any]) -> Any:
        return self._made().build(outputs)

    def _made(self) -> GraphCall:
        if self._call is None:
            self._call = self._make()
        return self._call


def graph_in(
    folder: Path, name: str, layouts: Sequence[tuple[int, ...] | None] = (), *, trust: bool = True
) -> GraphCall:
    """Read a graph, to be run operator by operator. Without `trust` it may call PyTorch's own operators alone."""
    from torchwright.optimization.engines.program import read_programs  # which imports the exporter

    program = read_programs(folder, trust=trust, names=(name,))[name]
    return GraphCall(program, spec_of(name, program), layouts)


_TENSOR = object()


def _inputs(program: ExportedProgram) -> list[Any]:
    """The graph's arguments: its constants, and `_TENSOR` for each tensor."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    found = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            value = spec.arg.value if isinstance(spec.arg, ConstantArgument) else values[spec.arg.name]
            found.append(_TENSOR if isinstance(value, torch.Tensor) else value)
    return found
