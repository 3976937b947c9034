# pyright: basic
"""Which modules suffer most from a technique: each judged by itself, by its own output or by the whole model's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchwright.engines.apply import apply_steps
from torchwright.facts import Ranked, Step
from torchwright.techniques.base import Target, Technique, from_step
from torchwright.techniques.shared.wrapping import layer_input, plain_name, relative_error

LONGEST = 60.0
"""Seconds that measuring effects on the whole model may take; the modules of the largest own errors come first."""


def rank_modules(target: Target, steps: Sequence[Step]) -> list[Ranked]:
    """The error that each module causes which the last of `steps` would change, worst first.

    Earlier steps are those without which it has nothing to change. Where the workload gives a `glance`, the error is
    the glance's, with this module alone changed. Else, and for modules that there was no time for, it is that of the
    module's output on the inputs that the model without it gives it: errors that add up through the network are the
    metric's business, the order of retreat is this one's.
    """
    technique = from_step(steps[-1])
    if steps[:-1]:
        apply_steps(target, steps[:-1])
    else:
        target.model = target.workload.adapt(target.model)
    with torch.inference_mode():
        own = _own_errors(target, technique)
        effects = _effects(target, technique, [name for name, _ in own])
    rest = [(name, error) for name, error in own if name not in dict(effects)]
    return [
        *(Ranked(name=plain_name(name), error=error, whole=True) for name, error in effects),
        *(Ranked(name=plain_name(name), error=error) for name, error in rest),
    ]


def _own_errors(target: Target, technique: Technique) -> list[tuple[str, float]]:
    model, errors = target.model, {}

    def watch(name: str):
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = layer_input(args, kwargs)
            error = technique.module_error(module, x) if isinstance(x, torch.Tensor) and x.numel() else None
            if error is not None:
                errors[name] = max(error, errors.get(name, 0.0))

        return hook

    handles = [
        module.register_forward_pre_hook(watch(name), with_kwargs=True)
        for name, module in model.named_modules()
        if name and technique.covers(name)
    ]
    try:
        for case in target.workload.calibration(target.compute_dtype):
            model(*case.args, **case.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return sorted(errors.items(), key=lambda item: item[1], reverse=True)


def _effects(target: Target, technique: Technique, names: list[str]) -> list[tuple[str, float]]:
    """What each module by itself does to the workload's glance, worst first; none where there is no glance."""
    model, begun = target.model, time.monotonic()

    def glance() -> torch.Tensor | None:
        return target.workload.glance(lambda case: model(*case.args, **case.kwargs))

    exact, effects = glance(), []
    if exact is None:
        return []
    for name in names:
        module = model.get_submodule(name)
        stand_in = technique.stand_in(module)
        if stand_in is None:
            continue
        if time.monotonic() - begun > LONGEST:
            break
        hook = module.register_forward_hook(
            lambda _, args, kwargs, output, stand_in=stand_in: stand_in(layer_input(args, kwargs)).to(
                output.dtype
            ),
            with_kwargs=True,
        )
        try:
            seen = glance()
            assert seen is not None
            effects.append((name, relative_error(exact, seen)))
        finally:
            hook.remove()
    return sorted(effects, key=lambda item: item[1], reverse=True)
