# pyright: basic
"""Applying steps to a target, in the order of their phases, with needs and clashes checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import DeviceFacts, Step
from torchwright.optimization.techniques.base import Target, from_step, in_order, techniques
from torchwright.workloads.base import Workload

DISCOVERED = frozenset({"sdpa", "exportable"})
"""Properties that only `describe.py` looks for; a step that needs one was chosen because it is there."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def make_target(workload: Workload, device: DeviceFacts) -> Target:
    """A fresh target with the properties that its modules show; the workload makes its calls where the model is."""
    model, workload.device = workload.build().to(device.kind), device.kind
    target = Target(model=model, workload=workload, device=device, properties=set())
    target.properties = _properties(target)
    return target


def seen_target(model: nn.Module, workload: Workload, device: DeviceFacts) -> Target:
    """Return a target to look at, not to change: the model is the caller's own."""
    target = Target(model=model, workload=workload, device=device, properties=set())
    target.properties = _properties(target)
    return target


def refusal(target: Target, step: Step, given: frozenset[str]) -> str | None:
    """Return why `step` cannot run on an original, or None. Other steps may give the properties in `given`.

    What only running the model shows (`DISCOVERED`) is taken for granted.
    """
    technique = from_step(step)
    if reason := technique.available(target.device):
        return reason
    have = frozenset(target.properties) | DISCOVERED
    lacks = technique.required - have
    if missing := lacks - given:
        named = ", ".join(sorted(missing)).replace("_", " ")
        return f"the model has no: {named}{_givers(missing, have)}"
    if lacks:  # what it would say of the original is not true of the model that it gets
        return None
    seen = replace(target, properties=target.properties | DISCOVERED)
    reasons = [
        form.refuse(seen) for form in (technique.variants(seen) if technique.is_open else (technique,))
    ]
    return reasons[0] if reasons and all(reasons) else None


def _givers(lacking: frozenset[str], have: frozenset[str]) -> str:
    """Name the techniques that would give a model with the properties `have` all that is lacking."""
    found = [name for name, cls in techniques if lacking <= cls.gives and cls.needs <= have]
    return f"; ask for {' or '.join(found)} too" if found else ""


def apply_steps(target: Target, steps: Sequence[Step]) -> None:
    """Apply `steps` in order. With any step at all, the workload's adapted form of the model is what they change.

    Raises `RefusedTechnique` when a step's needs are not met or it refuses this target.
    """
    if steps:
        target.model = target.workload.adapt(target.model)
    techniques_in_order = [from_step(step) for step in in_order(steps)]
    promised = frozenset().union(*(technique.gives for technique in techniques_in_order))
    for technique in techniques_in_order:
        step = technique.step()
        missing = technique.needs - target.properties - promised - DISCOVERED
        if missing:
            raise RefusedTechnique(
                f"{step} cannot be applied here", found=f"the model lacks: {', '.join(sorted(missing))}"
            )
        reason = technique.available(target.device) or technique.refuse(target)
        if reason:
            raise RefusedTechnique(f"{step} cannot run here", found=reason)
        target.workload = technique.reshape(target.workload)
        technique.apply(target)
        target.properties = (target.properties - technique.removed) | technique.gives


def reshaped(workload: Workload, steps: Sequence[Step]) -> Workload:
    """The workload as `steps` ask it."""
    for step in in_order(steps):
        workload = from_step(step).reshape(workload)
    return workload


def weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, those shared counted once."""
    seen = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()] if t.numel()}
    return sum(seen.values())


def _properties(target: Target) -> set[str]:
    modules = list(target.model.modules())
    found = {"eager", target.device.kind}
    tensors = [*target.model.parameters(), *target.model.buffers()]
    floats = {t.dtype for t in tensors if t.is_floating_point()}
    if floats:
        found |= {"floating", "float_weights"}
    if floats <= {torch.float32}:
        found.add("float32")
    if floats <= {torch.float32, torch.bfloat16}:
        found.add("float32_range")
    if any(isinstance(m, nn.Linear) for m in modules):
        found.add("linear")
    if any(isinstance(m, CONVOLUTIONS) for m in modules):
        found.add("convolution")
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules):
        found.add("batch_norm")
    if found & {"linear", "convolution"}:
        found.add("layers")
    return found | target.workload.properties(target.model)
