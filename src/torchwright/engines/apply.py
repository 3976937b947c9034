# pyright: basic
"""Applying steps to a target, in the order of their phases, with needs and clashes checked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchwright.engines.identity import identity
from torchwright.engines.program import export
from torchwright.errors import RefusedTechnique
from torchwright.facts import DeviceFacts, Step
from torchwright.techniques.base import Target, Technique, from_step, in_order, techniques
from torchwright.techniques.matmul_attention import AttentionCalls
from torchwright.workloads.base import Workload

DISCOVERED = frozenset({"sdpa", "exportable"})
"""Properties that only `describe_target` looks for; a step that needs one was chosen because it is there."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def make_target(workload: Workload, device: DeviceFacts) -> Target:
    """A fresh target with the properties that its modules show; the workload makes its calls where the model is."""
    model, workload.device = workload.build().to(device.kind), device.kind
    target = Target(model=model, workload=workload, device=device, properties=set())
    target.properties = _properties(target)
    return target


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
        target.properties = (target.properties - technique.removes) | technique.gives


def reshaped(workload: Workload, steps: Sequence[Step]) -> Workload:
    """The workload as `steps` ask it."""
    for step in in_order(steps):
        workload = from_step(step).reshape(workload)
    return workload


def describe_target(target: Target, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Everything the search needs to know of the original before it tries anything.

    With `names` these techniques alone are asked, and nothing is measured that only the choice among many needs.
    """
    from torchwright.measure.microbench import LinearCalls, linear_kernel_seconds
    from torchwright.measure.roofline import count_operations

    cases = target.workload.cases(torch.float32)
    original = identity(target.model)
    adapted = target.workload.adapt(target.model)
    asked = [cls for _, cls in techniques] if names is None else [techniques.get(name) for name in names]
    operations = {}
    with torch.inference_mode():
        with (
            LinearCalls(adapted) as linears,
            AttentionCalls() as attention,
        ):  # one pass sees all: it may take seconds
            for case in cases:
                linears.repeat = case.repeat
                operations[case.name] = count_operations(adapted, case)
        if names is None and "linear" in target.properties:
            target.kernel_seconds = linear_kernel_seconds(linears, target.device)
    if attention.seen:
        target.properties.add("sdpa")
    begun = time.perf_counter()
    if names is None or any("exportable" in cls.needs for cls in asked):
        target.properties |= {"exportable"} if _exports(adapted, cases) else set()
    export_seconds = time.perf_counter() - begun
    return {
        "device": target.device,
        "original": original,
        "properties": frozenset(target.properties),
        "variants": [variant for cls in asked for variant in _variants(cls, target)],
        "operations": operations,
        "kernel_seconds": target.kernel_seconds,
        "export_seconds": export_seconds,
        "called_as_is": target.workload.called_as_is(),
        "repeats": {case.name: case.repeat for case in cases},
        "weight_bytes": weight_bytes(target.model),
    }


def _variants(cls: type[Technique], target: Target) -> list[tuple[Step, str | None]]:
    """What is worth trying of one technique, each with the reason where it is not."""
    blanket = cls.available(target.device)
    if blanket:
        return [(Step(name=cls.name), blanket)]
    return [(technique.step(), technique.refuse(target)) for technique in cls().variants(target)]


def weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, those shared counted once."""
    seen = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()] if t.numel()}
    return sum(seen.values())


def _exports(model: nn.Module, cases: Sequence[Any]) -> bool:
    try:
        export(model, cases)
    except RefusedTechnique:
        return False
    return True


def _properties(target: Target) -> set[str]:
    modules = list(target.model.modules())
    found = {"eager", target.device.kind}
    tensors = [*target.model.parameters(), *target.model.buffers()]
    floats = {t.dtype for t in tensors if t.is_floating_point()}
    if floats:
        found |= {"floating", "float_weights"}
    if floats <= {torch.float32}:
        found.add("float32")
    if any(isinstance(m, nn.Linear) for m in modules):
        found.add("linear")
    if any(isinstance(m, CONVOLUTIONS) for m in modules):
        found.add("convolution")
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules):
        found.add("batch_norm")
    if found & {"linear", "convolution"}:
        found.add("layers")
    if len(target.workload.cases(torch.float32)) > 1 and target.workload.name == "module":
        found.add("several_shapes")
    return found | target.workload.properties(target.model)
