# pyright: basic
"""Which operator of a graph another library refuses, and where the model calls it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import fx
from torch.export import ExportedProgram

from torchwright.errors import RefusedTechnique, first_line
from torchwright.exporter.reference import line_of, module_of, operator_of

COMPLAINTS = re.compile(
    r"\b(no|not|un\w+|miss\w+|fail\w*|cannot|can't|lacks?|invalid|error|without)\b|^\s*target: ",
    re.IGNORECASE,
)
"""Words of a line that says what is wrong: a graph that is printed after it names every operator."""
NAME = re.compile(r"\b(\w+)(?:::|\.)(\w+)")
NODE = re.compile(r"%(\w+)")
MOST = 3
"""Operators, and places of each, that are named."""
LONGEST = 300
"""Characters of the other library's own words."""


def refused_graph(summary: str, program: ExportedProgram, error: BaseException | str) -> RefusedTechnique:
    """Return the refusal of a graph: the operators that `error` names, where the model calls each, and what to do."""
    texts = list(_texts(error))
    lines = [line for text in texts for line in text.splitlines()]
    for line in filter(COMPLAINTS.search, lines):
        if nodes := _named(program, line):
            said = " ".join(line.strip(" -\t").split())[:LONGEST]
            places = "; ".join(_places(name, found) for name, found in list(nodes.items())[:MOST])
            return RefusedTechnique(
                summary,
                found=f"{places}: {said}",
                next="compute it there with other operators, or export to pt2, which keeps PyTorch's own",
            )
    return RefusedTechnique(summary, found=first_line(texts[0]))


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
