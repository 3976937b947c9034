"""An engine in a package of its own, and the technique by which a recipe asks for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchwright.core.errors import RefusedTechnique, first_line
from torchwright.optimization.engines.base import Engine
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.workloads.base import Case


class FrozenTrace(Engine):
    """Runs each call as torch.jit.trace records it, with the weights frozen in; any other call by the model itself.

    An artifact does not hold the trace, since TorchScript's files hold pickles: loading traces the model again.
    """

    name: ClassVar[str] = "frozen_trace"
    how: ClassVar[str] = "frozen trace"

    def __init__(self, model: nn.Module, traces: dict[Any, Callable[..., Any]]) -> None:
        self._model, self._traces = model, traces

    @classmethod
    def prepare(cls, target: Target, folder: Path | None = None) -> Self:
        cases = target.workload.graphs(target.compute_dtype)
        return cls(target.model, {_looks(case): _traced(target.model, case) for case in cases})

    def __call__(self, case: Case) -> Any:
        trace = self._traces.get(_looks(case), self._model)
        return trace(*case.args, **case.kwargs)


@dataclass(frozen=True, kw_only=True)
class FreezeTrace(Technique):
    """Run the model as torch.jit.trace records it, its weights frozen in: no Python between its operators."""

    name: ClassVar[str] = "freeze_trace"
    phase: ClassVar[Phase] = Phase.COMPILE
    needs: ClassVar[frozenset[str]] = frozenset({"eager"})
    removes: ClassVar[frozenset[str]] = frozenset({"eager"})

    def apply(self, target: Target) -> None:
        target.settings.engine = FrozenTrace.name
        total = sum(1 for _ in target.model.modules())
        self.cover(target, total, kernel=FrozenTrace.how)


def _traced(model: nn.Module, case: Case) -> Callable[..., Any]:
    if not all(isinstance(value, torch.Tensor) for value in (*case.args, *case.kwargs.values())):
        raise RefusedTechnique("only tensors can be traced", found="an argument that is none")
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (case.args, case.kwargs))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is an old way, and what it may have missed
            traced = torch.jit.trace(model.eval(), args or None, example_kwarg_inputs=kwargs or None)
            return torch.jit.freeze(traced)
    except Exception as error:  # torch raises whatever the model makes it stumble over
        raise RefusedTechnique("the model cannot be traced", found=first_line(error)) from error


def _looks(case: Case) -> Any:
    """Return the signature for which a trace holds: sizes and types, by position and name; None for other inputs."""
    named = {**dict(enumerate(case.args)), **case.kwargs}
    if not all(isinstance(value, torch.Tensor) for value in named.values()):
        return None
    return tuple((key, tuple(value.shape), value.dtype) for key, value in named.items())
