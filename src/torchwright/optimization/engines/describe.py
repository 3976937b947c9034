# pyright: basic
"""Describe an original: the facts that the search needs before it tries anything."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import DeviceFacts, Features, Identity, Step
from torchwright.hardware.measure.roofline import Counts, count_operations
from torchwright.optimization.engines.apply import CONVOLUTIONS
from torchwright.optimization.engines.compiled.program import export
from torchwright.optimization.engines.dispatch.call import written
from torchwright.optimization.engines.identity import identity
from torchwright.optimization.techniques.base import Target, Technique, techniques
from torchwright.optimization.techniques.matmul_attention import AttentionCalls
from torchwright.optimization.techniques.shared.real_pairs import has_complex
from torchwright.workloads.base import Case


@dataclass(frozen=True, kw_only=True)
class Description:
    """The original on this machine, and what can be tried on it."""

    device: DeviceFacts
    original: Identity
    properties: frozenset[str]
    variants: tuple[tuple[Step, str | None], ...]
    """The steps worth trying, and the reason against each of the others."""
    counts: dict[str, Counts]
    """The seconds of each call."""
    kernel_seconds: dict[str, float]
    """See `Target`."""
    export_seconds: float
    called_as_is: bool
    """See `Workload`."""
    features: Features


def describe_target(target: Target, names: Sequence[str] | None = None) -> Description:
    """With `names` these techniques alone are asked, and nothing is measured that only the choice among many needs."""
    from torchwright.hardware.measure.microbench import LinearCalls, linear_kernel_seconds

    cases = target.workload.cases(torch.float32)
    original = identity(target.model)
    adapted = target.workload.adapt(target.model)
    asked = [cls for _, cls in techniques] if names is None else [techniques.get(name) for name in names]
    counts = {}
    with torch.inference_mode():
        with (
            LinearCalls(adapted) as linears,
            AttentionCalls() as attention,
        ):  # one pass sees all: it may take seconds
            for case in cases:
                linears.repeat = case.repeat
                counts[case.name] = count_operations(adapted, case)
        if names is None and "linear" in target.properties:
            target.kernel_seconds = linear_kernel_seconds(linears, target.device)
    if attention.seen:
        target.properties.add("sdpa")
    begun = time.perf_counter()
    handed_over = any("exportable" in cls.needs and not cls.available(target.device) for cls in asked)
    looked = names is None or any("exportable" in cls.needs | cls.gives for cls in asked)
    # What is asked for by name says itself why the model does not export.
    target.properties |= _graph_properties(adapted, cases, judged=handed_over) if looked else {"exportable"}
    export_seconds = time.perf_counter() - begun
    return Description(
        device=target.device,
        original=original,
        properties=frozenset(target.properties),
        variants=tuple(variant for cls in asked for variant in _variants(cls, target)),
        counts=counts,
        kernel_seconds=target.kernel_seconds,
        export_seconds=export_seconds,
        called_as_is=target.workload.called_as_is(),
        features=_features(target, cases, counts),
    )


def _features(target: Target, cases: Sequence[Case], counts: dict[str, Counts]) -> Features:
    model = target.model
    kinds = Counter[str]()
    for case in cases:
        for kind, count in counts[case.name].kinds.items():
            kinds[kind] += count * case.repeat
    operations = kinds.total()
    convolutions = [module for module in model.modules() if isinstance(module, CONVOLUTIONS)]
    nbytes = Counter[str]()
    for weight in (*model.parameters(), *model.buffers()):
        nbytes[str(weight.dtype).removeprefix("torch.")] += weight.nbytes
    depthwise = sum(1 < module.groups == module.in_channels for module in convolutions)
    return Features(
        linear=kinds["linear"] / max(operations, 1),
        convolution=kinds["convolution"] / max(operations, 1),
        attention=kinds["attention"] / max(operations, 1),
        depthwise=depthwise / max(len(convolutions), 1),
        recurrent=any(isinstance(module, nn.RNNBase) for module in model.modules()),
        decode=any(case.name == "decode" for case in cases),
        operations=operations,
        weight_bytes=nbytes.total(),
        dtype=max(nbytes, key=lambda dtype: nbytes[dtype], default="none"),
        pipeline=bool(target.workload.parts()),
    )


def _variants(cls: type[Technique], target: Target) -> list[tuple[Step, str | None]]:
    """Return one technique's steps worth trying, and the reason against each of the others."""
    blanket = cls.available(target.device)
    if blanket:
        return [(Step(name=cls.name), blanket)]
    return [(technique.step(), technique.refuse(target)) for technique in cls().variants(target)]


def _graph_properties(model: nn.Module, cases: Sequence[Case], *, judged: bool) -> set[str]:
    """Return the properties that the exported graphs show; with `judged`, also whether they write, which may take a
    second.
    """
    try:
        programs = export(model, cases).values()
    except RefusedTechnique:
        return set()
    found = {"exportable"}
    if not any(has_complex(program.graph_module) for program in programs):
        found.add("real_graph")
    if judged and any(written(program) for program in programs):
        found.add("writes")
    return found
