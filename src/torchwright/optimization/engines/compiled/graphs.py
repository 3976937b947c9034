# pyright: basic, reportPrivateUsage=false
"""Exported graphs as calls, run operator by operator."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx.graph import CodeGen

from torchwright.optimization.engines.dispatch.call import spec_of
from torchwright.optimization.engines.dispatch.results import call_result
from torchwright.optimization.engines.dispatch.spec import CallSpec, NotHeld

REMEMBERED = 1024
"""Signatures that are not checked again; models are called with a few kinds of inputs."""
ATEN_CALL = re.compile(r"\btorch\.ops\.aten\.(\w+)\.(\w+)\(")
"""A call in the code that torch.fx writes for a graph."""


class GraphCall:
    """An exported graph, called as a plain Python function of its tensors.

    `program.module()` looks up every weight through its submodules and checks every call's sizes, which takes a third
    of a small model's call. Here weights are bound once, and sizes are checked once per signature.
    """

    def __init__(
        self, program: ExportedProgram, spec: CallSpec, layouts: Sequence[tuple[int, ...] | None] = ()
    ) -> None:
        self.spec = spec
        module = program.module()
        module._forward_pre_hooks.clear()  # they check types and sizes, as the dispatcher has
        module.graph.set_codegen(CodeGen())
        _keep_not_finite(module)
        self._guards = _take_guards(module)
        self._held: set[Any] = set()
        """The signatures that passed the guards."""
        self._forward = _with_bound_weights(module)
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
            if self._guards:
                self._check(arguments, tensors)
            outputs = self._forward(*arguments)
        except AssertionError as error:  # a guard of torch.export's, over the sizes
            raise NotHeld(
                "the exported graph does not hold for this call", found=str(error).splitlines()[0][:200]
            ) from error
        return self.build(list(outputs))

    def _check(self, arguments: list[Any], tensors: list[torch.Tensor]) -> None:
        signature = tuple([(tensor.shape, tensor.stride()) for tensor in tensors])
        if signature in self._held:
            return
        for guard, places in self._guards:
            guard(*[arguments[place] for place in places])
        if len(self._held) >= REMEMBERED:
            self._held.clear()
        self._held.add(signature)


def _take_guards(module: torch.fx.GraphModule) -> list[tuple[Callable[..., Any], list[int]]]:
    """Remove torch.export's checks of sizes from a graph; return each with the indices of the inputs that it reads."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    found = []
    for node in list(module.graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn" and all(n in inputs for n in node.args):
            found.append((module.get_submodule(node.target), [inputs.index(n) for n in node.args]))
            module.graph.erase_node(node)
    return found


def _with_bound_weights(module: torch.fx.GraphModule) -> Callable[..., Any]:
    """Return the graph as a function of its inputs, with weights as arguments that are already given.

    As attributes, `self.layers.0.weight`, each weight would cost a Python call per level at every call.
    """
    graph = module.graph
    attributes = [node for node in graph.nodes if node.op == "get_attr"]
    with graph.inserting_before(next(iter(graph.nodes))):
        places = [graph.placeholder(f"bound_{index}") for index in range(len(attributes))]
    for node, place in zip(attributes, places, strict=True):
        node.replace_all_uses_with(place)
        graph.erase_node(node)
    weights = [functools.reduce(getattr, node.target.split("."), module) for node in attributes]
    module.recompile()
    return functools.partial(_with_bound_operators(module), *weights)


def _with_bound_operators(module: torch.fx.GraphModule) -> Callable[..., Any]:
    """Return a graph's function, with PyTorch's operators as global names.

    `torch.ops.aten.linear.default(…)` costs four look-ups and a Python function, a tenth of the time of a model of
    thirty small operators.
    """
    forward: Any = module.forward
    names = dict(forward.__func__.__globals__)

    def bound(match: re.Match[str]) -> str:
        operator = getattr(getattr(torch.ops.aten, match[1]), match[2])
        if type(operator) is not torch._ops.OpOverload:
            return match[0]
        name = f"aten_{match[1]}_{match[2]}"
        names[name] = operator._op
        return f"{name}("

    exec(ATEN_CALL.sub(bound, module.code), names)
    return functools.partial(names["forward"], module)


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
    from torchwright.optimization.engines.compiled.program import read_programs  # which imports the exporter

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
