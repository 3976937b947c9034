# pyright: basic
"""Which operator of a graph another library refuses, and where the model calls it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from torchwright.core.errors import RefusedTechnique, first_line
from torchwright.exporter.verification.reference import line_of, module_of, operator_of

COMPLAINTS = re.compile(
    r"\b(no|not|un\w+|miss\w+|fail\w*|cannot|can't|lacks?|invalid|error|without)\b|^\s*target: ",
    re.IGNORECASE,
)
"""Words of a line that says what is wrong: a graph that is printed after it names every operator."""
NAME = re.compile(r"\b(\w+)(?:::|\.)(\w+)")
NODE = re.compile(r"%(\w+)")
MOST = 3
"""Operators, and places of each, that are named."""
SECONDS = 20.0
"""No operator is converted alone after this time: one takes a tenth of a second, and a message is worth no more."""
LONGEST = 300
"""Characters of the other library's own words."""


def refused_graph(
    summary: str,
    program: ExportedProgram,
    error: BaseException | str,
    convert: Callable[[ExportedProgram], object] | None = None,
) -> RefusedTechnique:
    """Return the refusal of a graph: the operators that `error` names, where the model calls each, and what to do.

    Where it names none and `convert` is given, each operator is converted alone: the first that fails is the one.
    """
    texts = list(_texts(error))
    lines = [line for text in texts for line in text.splitlines()]
    for line in filter(COMPLAINTS.search, lines):
        if nodes := _named(program, line):
            return _refusal(summary, nodes, line)
    if convert is not None and (nodes := _refused_alone(program, convert)):
        return _refusal(summary, nodes, first_line(texts[0]))
    return RefusedTechnique(summary, found=first_line(texts[0]))


def _refusal(summary: str, nodes: dict[str, list[fx.Node]], line: str) -> RefusedTechnique:
    said = " ".join(line.strip(" -\t").split())[:LONGEST]
    places = "; ".join(_places(name, found) for name, found in list(nodes.items())[:MOST])
    return RefusedTechnique(
        summary,
        found=f"{places}: {said}",
        next="compute it there with other operators, or export to pt2, which keeps PyTorch's own",
    )


def _refused_alone(
    program: ExportedProgram, convert: Callable[[ExportedProgram], object]
) -> dict[str, list[fx.Node]]:
    """Return the first operator that `convert` refuses by itself, with its nodes; empty if none was found in time."""
    end = time.monotonic() + SECONDS
    kinds: dict[str, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            kinds.setdefault(operator_of(node), []).append(node)
    for name, nodes in kinds.items():
        if time.monotonic() > end:
            break
        try:
            alone = _alone(nodes[0])
        except (
            Exception
        ):  # of torch.export, at an operator that takes more than tensors of the example's sizes
            continue
        try:
            convert(alone)
        except Exception:
            return {name: nodes}
    return {}


def _alone(node: fx.Node) -> ExportedProgram:
    """A program of this one operator."""
    graph = fx.Graph()
    given: dict[fx.Node, fx.Node] = {}
    inputs: list[torch.Tensor] = []

    def argument(one: fx.Node) -> Any:
        value = one.meta["val"]
        if not isinstance(value, torch.Tensor):
            return _plain(value)
        if one not in given:
            given[one] = graph.placeholder(one.name)
            inputs.append(torch.ones([_plain(size) for size in value.shape], dtype=value.dtype))
        return given[one]

    args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
    operator: Any = node.target
    graph.output((graph.call_function(operator, args, kwargs),))
    return torch.export.export(fx.GraphModule({}, graph), tuple(inputs), strict=False)


def _plain(size: Any) -> Any:
    """A free size's number in the example, without its being fixed to that."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _texts(error: BaseException | str) -> Iterator[str]:
    """The texts of an error and of what it was raised from, the innermost first: that one knows the operator."""
    if isinstance(error, str):
        yield error
        return
    cause = error.__cause__ or error.__context__
    if cause is not None:
        yield from _texts(cause)
    yield str(error)


def _named(program: ExportedProgram, line: str) -> dict[str, list[fx.Node]]:
    """Operators of the graph that a line names, with their nodes: those of one node where it names nodes."""
    nodes, spelled = set(NODE.findall(line)), {".".join(parts) for parts in NAME.findall(line)}
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    chosen = [node for node in calls if node.name in nodes]
    chosen = chosen or [node for node in calls if operator_of(node) in spelled]
    # What a library decomposes to has another name: prims.bessel_j1 of aten.special_bessel_j1.
    ends = tuple(f"_{name.rpartition('.')[2]}" for name in spelled if name.startswith(("aten.", "prims.")))
    chosen = chosen or [node for node in calls if operator_of(node).replace(".", "_").endswith(ends)]
    found: dict[str, list[fx.Node]] = {}
    for node in chosen:
        found.setdefault(operator_of(node), []).append(node)
    return found


def _places(name: str, nodes: list[fx.Node]) -> str:
    places = []
    for node in nodes[:MOST]:
        line = line_of(node)
        places.append(f"{module_of(node)} ({line})" if line else module_of(node))
    more = f" and {len(nodes) - MOST} more" if len(nodes) > MOST else ""
    return f"{name} in {', '.join(dict.fromkeys(places))}{more}"
