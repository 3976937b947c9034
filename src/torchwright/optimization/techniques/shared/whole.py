# pyright: basic
"""A model whose calls break graphs, made whole: lines rewritten one by one, and what is left with its reason."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from torchwright.optimization.profile.breaks import find_breaks
from torchwright.optimization.profile.causes import COMPLEX, LOOP
from torchwright.optimization.profile.values import Breaks, GraphBreak
from torchwright.optimization.techniques.shared.purity import Scope
from torchwright.optimization.techniques.shared.source import Functions, NotRewritten
from torchwright.optimization.techniques.shared.unbreaking import BRANCH, ITEM, MESSAGE, NUMPY, Unbreak
from torchwright.workloads.base import Case

REWRITTEN = (ITEM, BRANCH, *MESSAGE, NUMPY)
ROUNDS = 8
"""A break may hide behind another: after each round the graph is looked at anew."""

Lines = dict[types.FunctionType, dict[int, set[str]]]


@dataclass
class Unbroken:
    """The outcome of removing a model's graph breaks."""

    model: nn.Module
    rewritten: list[GraphBreak] = field(default_factory=list)
    left: list[tuple[GraphBreak, str]] = field(default_factory=list)
    """With the reasons."""
    complex: list[GraphBreak] = field(default_factory=list)
    """Lines whose complex numbers the graph's own rewriting (`real_pairs`) is for."""
    methods: list[tuple[nn.Module, str]] = field(default_factory=list)
    """The attributes that the modules have of their own now."""

    def undo(self) -> None:
        """Let the modules run what their classes say."""
        for module, name in self.methods:
            delattr(module, name)
        self.methods.clear()


def unbreak(model: nn.Module, cases: Sequence[Case]) -> Unbroken:
    """Rewrite what breaks the graphs of these calls, as far as the code shows that it means the same.

    The modules of `model` get methods of their own, and their classes stay as they are.
    """
    found = Unbroken(model)
    functions = Functions(model)
    lines: Lines = {}
    met: set[tuple[str, int, str]] = set()
    try:
        for _ in range(ROUNDS):
            breaks = find_breaks(model, lambda called: lambda case: called(*case.args, **case.kwargs), cases)
            new = [each for each in breaks.found if (each.file, each.line, each.cause) not in met]
            for each in new:
                met.add((each.file, each.line, each.cause))
                if each.cause == COMPLEX.name:
                    found.complex.append(each)
                elif not _is_shadow(each, lines, functions):
                    lines = _with(found, functions, lines, each)
            if not new:
                break
    except BaseException:
        found.undo()
        raise
    return found


def judged(breaks: Breaks, model: nn.Module, cases: Sequence[Case]) -> Breaks:
    """The breaks of a model with what `unbreak` would make of each; the model stays as it is."""
    found = unbreak(model, cases)
    found.undo()
    rewritten = {place(each) for each in (*found.rewritten, *found.complex)}
    left = {place(each): reason for each, reason in found.left}
    return replace(
        breaks,
        found=tuple(
            replace(each, rewritten=place(each) in rewritten, left=left.get(place(each)))
            for each in breaks.found
        ),
    )


def _with(found: Unbroken, functions: Functions, lines: Lines, each: GraphBreak) -> Lines:
    """The lines with one more, where that can be rewritten, too."""
    try:
        if each.cause not in REWRITTEN:
            raise NotRewritten("there is no other form of it that means the same for certain")
        function = functions.at(each.file, each.line)
        of_function = lines.get(function, {})
        causes = of_function.get(each.line, set()) | {each.cause}
        wider = lines | {function: of_function | {each.line: causes}}
        changes = {function: Unbreak(_scope(functions, function), at) for function, at in wider.items()}
        rebuilt = functions.rebuild(changes)
    except NotRewritten as reason:
        found.left.append((each, str(reason)))
        return lines
    found.undo()
    for bound, function in rebuilt:
        setattr(bound.module, bound.name, types.MethodType(function, bound.module))
        found.methods.append((bound.module, bound.name))
    found.rewritten.append(each)
    return wider


def _scope(functions: Functions, function: types.FunctionType) -> Scope:
    return Scope(function, [bound.module for bound in functions.methods if bound.function is function])


def _is_shadow(each: GraphBreak, lines: Lines, functions: Functions) -> bool:
    """Check whether a break only follows from another one: a loop around it, or arrays that are tensors by now."""
    if each.cause == LOOP.name:
        return True
    arrays = {function for function, at in lines.items() if any(NUMPY in causes for causes in at.values())}
    try:
        return functions.at(each.file, each.line) in arrays
    except NotRewritten:
        return bool(arrays)


def place(each: GraphBreak) -> str:
    """Return a break's location, for people."""
    return f"{Path(each.file).name}:{each.line}"
