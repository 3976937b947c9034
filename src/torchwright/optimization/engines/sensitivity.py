# pyright: basic
"""Which modules suffer most from a technique: each judged by itself, by its own output or by the whole model's."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from torchwright.core import nested
from torchwright.core.records import DeviceFacts, Ranked, Step
from torchwright.optimization.engines.apply import apply_steps
from torchwright.optimization.techniques.base import Target, Technique, from_step
from torchwright.optimization.techniques.shared.wrapping import layer_input, plain_name, relative_error

LONGEST = 60.0
"""Seconds that measuring effects on the whole model may take; the modules of the largest own errors come first."""
FEWEST_GROUPS, GROUPED_SECONDS = 4, 8.0
"""Groups of modules whose effect is measured at once to begin with, and about how long all measurements may take."""


def rank_modules(target: Target, steps: Sequence[Step], longest: float = LONGEST) -> list[Ranked]:
    """Return the error from each module that the last of `steps` would change, in the order to leave them alone.

    Earlier steps are those without which it has nothing to change. If the workload gives a `glance`, the error is the
    glance's, with this module alone changed. Otherwise, or after `longest` seconds, it is the error
    of the module's output, on the inputs that the unchanged model gives it. The metric judges how errors add up
    through the network; this function only orders the retreat. If the technique's `errors_add`, it is the module's
    share of the whole model's error, measured by groups of neighbours with equal shares; the order counts time, too.
    Such a pipeline's modules are ranked by the glance if the technique knows their own errors.
    Elsewhere the worst comes first.
    """
    technique = from_step(steps[-1])
    if steps[:-1]:
        apply_steps(target, steps[:-1])
    else:
        target.model = target.workload.adapt(target.model)
    with torch.inference_mode():
        alone = not technique.errors_add or target.workload.parts()
        own = _own_errors(target, technique) if alone else {}
        if technique.errors_add and not own:
            return _parts(target, technique)
        effects = _effects(target, technique, list(own), longest)
    rest = {name: error for name, error in own.items() if name not in effects}
    return _ranked(effects, whole=True) + _ranked(rest, whole=False)


def _ranked(errors: dict[str, float], *, whole: bool) -> list[Ranked]:
    return [Ranked(name=plain_name(name), error=error, whole=whole) for name, error in errors.items()]


def _worst_first(errors: dict[str, float]) -> dict[str, float]:
    return dict(sorted(errors.items(), key=lambda item: item[1], reverse=True))


def _own_errors(target: Target, technique: Technique) -> dict[str, float]:
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
    return _worst_first(errors)


def _parts(target: Target, technique: Technique) -> list[Ranked]:
    """The part of each module that is called in the error of the model's first call, and its time.

    Those come first whose squared error is largest for that time (Dantzig's rule for the knapsack problem).
    """
    model, case = target.model, target.workload.cases(target.compute_dtype)[0]
    stand_ins = {
        name: stand_in
        for name, module in model.named_modules()
        if name and technique.covers(name) and (stand_in := technique.stand_in(module)) is not None
    }
    changed = {name: model.get_submodule(name) for name in stand_ins}

    def answer() -> torch.Tensor:
        return _floats(model(*case.args, **case.kwargs))

    with _estimating(changed, target.device) as seconds:
        exact = answer()
    names = [name for name in changed if name in seconds]

    def error(group: Sequence[str]) -> float:
        with _standing_in(model, {name: stand_ins[name] for name in group}):
            return relative_error(exact, answer())

    measured = _measured_groups(names, error, GROUPED_SECONDS)
    parts = {name: value / math.sqrt(len(group)) for group, value in measured for name in group}
    ranked = [
        Ranked(name=plain_name(name), error=error, whole=True, seconds=seconds[name])
        for name, error in parts.items()
    ]
    return sorted(ranked, key=lambda each: each.error**2 / max(each.seconds or 0.0, 1e-30), reverse=True)


def _measured_groups(
    names: Sequence[str], error: Callable[[Sequence[str]], float], seconds: float
) -> list[tuple[Sequence[str], float]]:
    """Return groups of neighbours, each with its error.

    A few groups of equal size are measured; then the one with the largest error is halved, as long as the time lasts.
    """
    begun, count = time.monotonic(), min(FEWEST_GROUPS, len(names))
    bounds = [i * len(names) // count for i in range(count + 1)] if names else []
    measured = [(names[a:b], error(names[a:b])) for a, b in itertools.pairwise(bounds)]
    calls = count
    while any(len(group) > 1 for group, _ in measured):
        spent = time.monotonic() - begun
        if spent + 2 * spent / calls >= seconds:
            break
        worst = max((pair for pair in measured if len(pair[0]) > 1), key=lambda pair: pair[1])
        measured.remove(worst)
        group, middle = worst[0], len(worst[0]) // 2
        measured += [(half, error(half)) for half in (group[:middle], group[middle:])]
        calls += 2
    return measured


@contextlib.contextmanager
def _estimating(modules: dict[str, nn.Module], device: DeviceFacts) -> Iterator[dict[str, float]]:
    """Yield a dict that gets the expected float32 seconds of each module that is called meanwhile, by name.

    They are the device's ceilings: a measured time of one call depends on who else ran.
    """
    seconds: dict[str, float] = {}

    def called(
        name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
    ) -> None:
        if not output.numel():  # an expert to whom no row was sent
            return
        weight: Any = module.weight
        operations = 2 * output.numel() * weight.numel() // len(weight)
        read = layer_input(args, kwargs)
        moved = weight.numel() + output.numel() + (read.numel() if isinstance(read, torch.Tensor) else 0)
        rates = 1e12 * device.tflops.get("float32", 1.0), 1e9 * (device.read_gb_per_s or math.inf)
        spent = max(operations / rates[0], moved * weight.element_size() / rates[1])
        seconds[name] = seconds.get(name, 0.0) + spent

    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            hooks.callback(module.register_forward_hook(partial(called, name), with_kwargs=True).remove)
        yield seconds


def parts_seconds(once: float) -> float:
    """Return the most seconds that `_parts` takes for a model whose call takes `once`."""
    return once + max(FEWEST_GROUPS * once, GROUPED_SECONDS)


def _floats(outputs: Any) -> torch.Tensor:
    """All numbers of the outputs in one row."""
    tensors = nested.tensors(outputs)
    return torch.cat([tensor.float().flatten() for tensor in tensors if tensor.is_floating_point()])


@contextlib.contextmanager
def _standing_in(model: nn.Module, stand_ins: dict[str, nn.Module]) -> Iterator[None]:
    """Meanwhile stand-ins compute what the modules of these names give."""
    with contextlib.ExitStack() as hooks:
        for name, stand_in in stand_ins.items():
            module = model.get_submodule(name)
            hooks.callback(module.register_forward_hook(partial(_instead, stand_in), with_kwargs=True).remove)
        yield


def _instead(
    stand_in: nn.Module, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
) -> torch.Tensor:
    return stand_in(layer_input(args, kwargs)).to(output.dtype)


def _effects(target: Target, technique: Technique, names: list[str], longest: float) -> dict[str, float]:
    """Return each module's own effect on the workload's glance, worst first; empty without a glance."""
    model, begun = target.model, time.monotonic()

    def glance() -> torch.Tensor | None:
        return target.workload.glance(lambda case: model(*case.args, **case.kwargs))

    exact, effects = glance(), dict[str, float]()
    if exact is None:
        return {}
    for name in names:
        stand_in = technique.stand_in(model.get_submodule(name))
        if stand_in is None:
            continue
        if time.monotonic() - begun > longest:
            break
        with _standing_in(model, {name: stand_in}):
            seen = glance()
        assert seen is not None
        effects[name] = relative_error(exact, seen)
    return _worst_first(effects)
