# pyright: basic
"""Lines that break a graph, rewritten so that the model is one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torchwright.core import nested
from torchwright.core.errors import RefusedTechnique, first_line
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.fresh import FORMS, answers, disagreement
from torchwright.optimization.techniques.shared.real_pairs import real_pairs
from torchwright.optimization.techniques.shared.unbreaking import BRANCH
from torchwright.optimization.techniques.shared.whole import Unbroken, place, unbreak
from torchwright.workloads.base import Case


@dataclass(frozen=True, kw_only=True)
class WholeGraph(Technique):
    """Rewrite common lines that break a graph (branches, item(), printing, NumPy, complex numbers), where proven."""

    name: ClassVar[str] = "whole_graph"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"eager"})
    gives: ClassVar[frozenset[str]] = frozenset({"exportable", "real_graph"})
    enables: ClassVar[bool] = True

    def refuse(self, target: Target) -> str | None:
        if self.gives <= target.properties:
            return "every call of the model is one graph of real numbers already"
        return None

    def apply(self, target: Target) -> None:
        model, cases = target.model, target.workload.graphs(target.compute_dtype)
        before = answers(model, cases)
        if reason := disagreement(before, answers(model, cases)):
            raise _refusal(f"called again {reason}")
        unbroken = unbreak(model, cases)
        try:
            _check(unbroken, cases, before)
        except BaseException:
            unbroken.undo()
            raise
        if unbroken.complex:
            target.settings.rewrites.append(real_pairs)
        changed = {place(each) for each in (*unbroken.rewritten, *unbroken.complex)}
        left = {place(each): reason for each, reason in unbroken.left if place(each) not in changed}
        self.cover(target, len(changed) + len(left), changed=len(changed), unit="lines", skipped=left)


def _check(unbroken: Unbroken, cases: Sequence[Case], before: list[Any]) -> None:
    """Raise `RefusedTechnique` where the model is not one graph now, or answers otherwise than before."""
    lines = [f"{place(each)}: {reason}" for each, reason in unbroken.left]
    if any(each.cause == BRANCH for each, _ in unbroken.left):
        raise _refusal("; ".join(lines))
    if not unbroken.rewritten and not unbroken.complex:
        raise _refusal("; ".join(lines) or "torch.compile makes whole graphs of its calls, of real numbers")
    reason = disagreement(before, answers(unbroken.model, cases))
    if reason:
        raise _refusal(f"with its lines rewritten {reason}")
    for case, expected in zip(cases, before[:: len(FORMS)], strict=True):
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            try:
                args, kwargs = nested.opened((case.args, case.kwargs))
                with nested.takes_records(unbroken.model):
                    program = torch.export.export(unbroken.model, args, kwargs, strict=False)
                program = program.run_decompositions({})
            except Exception as error:
                raise _refusal("; ".join(lines) or f"{type(error).__name__}: {first_line(error)}") from error
            real_pairs(program.graph_module)
            reason = disagreement([expected], [nested.closed(program.module()(*args, **kwargs))])
        if reason:
            raise _refusal(f"as one graph {reason}")


def _refusal(found: str) -> RefusedTechnique:
    return RefusedTechnique("this model cannot be made one graph by rewriting lines", found=found)
