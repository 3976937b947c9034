"""The report of a graph's rewriting: its changes and its failures, with positions in the user's code."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from torchwright.core.errors import TorchwrightError

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]*)')
_NOT_THE_USERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
SHOWN = 8
"""Refused operations that a message names."""


class SequenceParallelError(TorchwrightError):
    """A model, mesh or batch for which the graph cannot be rewritten."""


@dataclass(frozen=True)
class OperationSite:
    """An operation of the captured graph and the line that asked for it."""

    operation: str
    module: str
    """Its path in the model."""
    said: str
    line: str
    """The user's: `file:line in function: code`."""

    def __str__(self) -> str:
        return f"{self.module or 'model'}: {self.operation}: {self.said}\n    {self.line}"


@dataclass
class RewriteReport:
    """The report of one graph: rewritten operations, and the others.

    `refused` is empty for a graph that runs. `whole` are parameters' own computations and others that every process
    does in full: positions, masks, labels before they are divided.
    """

    ways: int
    length: int
    """Tokens of a sequence, of which a process has the `ways`-th part."""
    attentions: list[OperationSite] = field(default_factory=list)
    sums: list[OperationSite] = field(default_factory=list)
    """Operations over all tokens that became a sum over the processes: losses, means."""
    refused: list[OperationSite] = field(default_factory=list)
    divided: int = 0
    """Operations that run on parts."""
    whole: int = 0
    """Operations that every process runs in full."""

    def __str__(self) -> str:
        lines = [
            f"{self.length} tokens over {self.ways} processes: {self.divided} operations on parts, "
            f"{self.whole} in full on each (positions, masks, labels)"
        ]
        for title, places in (
            ("attentions", self.attentions),
            ("sums over processes", self.sums),
            ("not rewritten", self.refused),
        ):
            lines += [f"{title}: {len(places)}", *(f"  {place}" for place in places)]
        return "\n".join(lines)

    def check(self) -> None:
        """Raises `SequenceParallelError` where something was refused, with the lines, or nothing was divided."""
        if not self.refused and not self.divided:
            raise SequenceParallelError(
                "no tokens were found to divide",
                allowed="ids that an embedding looks up, or inputs (batch, tokens, features)",
            )
        if not self.refused:
            return
        named = "; ".join(f"{place.operation} ({place.line}): {place.said}" for place in self.refused[:SHOWN])
        left = len(self.refused) - SHOWN
        raise SequenceParallelError(
            f"{len(self.refused)} operation(s) cannot run on a part of the sequence",
            found=named + (f"; and {left} more" if left > 0 else ""),
            next="the report lists all of them; tokens may meet in attention, in sums and in means",
        )


def place_of(node: Node, said: str) -> OperationSite:
    modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    module = modules[-1].removeprefix("model").removeprefix(".") if modules else ""
    return OperationSite(str(node.target).removesuffix(".default"), module, said, _line(node))


def _line(node: Node) -> str:
    """The innermost line outside PyTorch: `file:line in function: code`."""
    users = [
        match
        for match in _FRAME.finditer(node.meta.get("stack_trace") or "")
        if not match["file"].startswith(_NOT_THE_USERS)
    ]
    if not users:
        return "no line known"
    found = users[-1]
    return f"{found['file']}:{found['line']} in {found['function']}: {found['code'].strip()}"
