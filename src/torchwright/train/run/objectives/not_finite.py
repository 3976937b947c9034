"""The first layer of a step that is not finite: the step is computed again with every layer watched.

Each layer's input and output are checked in the forward pass, in their order. The gradients of its output and of its
parameters are checked in the backward pass. The first that holds infinity or nan is named, with its rows of the
batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

NUMBERED = 8
"""Rows that a message lists at most."""


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """The first tensor of a step that is not finite."""

    where: str
    """The tensor's name, such as "the output of layers.3.mlp.down"."""
    rows: list[int]
    """The step's rows that are not finite; empty if the tensor has no rows."""
    looked: int
    """At how many tensors before it; what is broken in one process breaks the gradients of all later on."""


@dataclass
class _Watch:
    """Notes the first tensor that is not finite, and the rows of the first that has some (weights have none)."""

    rows: int
    """Rows of a micro-batch: the first size of the tensors that have them."""
    looked: int = 0
    where: str | None = None
    bad: list[int] = field(default_factory=list)

    def look(self, where: str, tensor: Any) -> None:
        if self.bad or not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return
        self.looked += self.where is None
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        finite = local.isfinite()
        if bool(finite.all()):
            return
        self.where = self.where or where
        if local.dim() >= 2 and local.shape[0] == self.rows:
            self.bad = (~finite.flatten(1).all(1)).nonzero().flatten().tolist()


def first_not_finite(
    model: nn.Module, again: Callable[[int], object], places: Sequence[range]
) -> Sighting | None:
    """Do the step's forward and backward pass again without moving anything; what is first no number in it.

    `places` are the step's rows that each micro-batch of this process holds, `again(number)` computes one's gradients.
    Every process of the run calls it. None where each layer is finite, as where only a sum overflows.
    """
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        found = None if local.isfinite().all() else Sighting(where=f"the weight {name}", rows=[], looked=0)
        if first := _of_all(found):
            return first
    for number, rows in enumerate(places):
        watch = _Watch(len(rows))
        with _watched(model, watch), torch.compiler.set_stance("force_eager"):
            again(number)
        found = None
        if watch.where is not None:
            found = Sighting(where=watch.where, rows=[rows[row] for row in watch.bad], looked=watch.looked)
        if first := _of_all(found):
            return first
    return None


def not_finite_message(
    first: Sighting | None, begin: int, count: int, describe: Callable[[int, int], str]
) -> str:
    """The place and the rows, for a message: each row's file and place, or those where the batch begins.

    The step holds `count` rows from `begin` on, which `describe(begin, count)` names.
    """
    where = f"first in {first.where}" if first else "every layer's own tensors are finite"
    batch = f"its batch: {describe(begin, count)}"
    rows = first.rows if first else []
    if not 0 < len(rows) < count:
        return f"{where}; {batch}"
    named = [f"row {row}, {describe(begin + row, 1)}" for row in rows[:NUMBERED]]
    more = f"; and {len(rows) - NUMBERED} more" if len(rows) > NUMBERED else ""
    return f"{where}, in {'; '.join(named)}{more}; {batch}"


def _of_all(found: Sighting | None) -> Sighting | None:
    """The earliest of all processes', with the rows of all that found it in the same place."""
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, found)
    there = [other for other in everybodys if other is not None]
    if not there:
        return None
    first = min(there, key=lambda other: other.looked)
    rows = {row for other in there if other.where == first.where for row in other.rows}
    return replace(first, rows=sorted(rows))


@contextlib.contextmanager
def _watched(model: nn.Module, watch: _Watch) -> Generator[None]:
    """Let `watch` look at what goes into and out of every module, and at the gradients on their way back."""
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_pre_hook(partial(_before, watch, name)))
                hooks.enter_context(module.register_forward_hook(partial(_after, watch, name)))
        for name, parameter in model.named_parameters():
            parameter.grad = None
            if parameter.requires_grad:
                look = partial(_gradient, watch, name)
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(look))
        yield


def _before(watch: _Watch, name: str, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
    for tensor in inputs:
        watch.look(f"the input of {name}", tensor)


def _after(watch: _Watch, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
    watch.look(f"the output of {name}", output)
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(partial(watch.look, f"the gradient of the output of {name}"))


def _gradient(watch: _Watch, name: str, parameter: torch.Tensor) -> None:
    watch.look(f"the gradient of {name}", parameter.grad)
