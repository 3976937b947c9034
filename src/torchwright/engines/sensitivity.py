# pyright: basic
"""Which modules suffer most from a technique: one pass over calibration data, each module judged by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchwright.engines.apply import apply_steps
from torchwright.facts import Step
from torchwright.techniques.base import Target, from_step
from torchwright.techniques.shared.wrapping import layer_input


def rank_modules(target: Target, steps: Sequence[Step]) -> list[tuple[str, float]]:
    """(module name, relative error of its output) for every module the last of `steps` would change, worst first.

    Earlier steps are those without which it has nothing to change. The error of each module is measured on the inputs
    that the model without it gives it: errors that add up through the
    network are the metric's business, the order of retreat is this one's.
    """
    technique = from_step(steps[-1])
    if steps[:-1]:
        apply_steps(target, steps[:-1])
    else:
        target.model = target.workload.adapt(target.model)
    model = target.model
    errors: dict[str, float] = {}

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
        if name
    ]
    try:
        with torch.inference_mode():
            for case in target.workload.calibration(target.compute_dtype):
                model(*case.args, **case.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return sorted(errors.items(), key=lambda item: item[1], reverse=True)
