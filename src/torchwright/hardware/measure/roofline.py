"""Operations and bytes of a call, and the time that the measured ceilings allow for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from torchwright.core import nested
from torchwright.core.records import DeviceFacts, RooflinePoint
from torchwright.workloads.base import Case


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The operations and bytes of one call, weights apart."""

    operations: int
    """Operations of matrix products, convolutions and attention; multiply and add count separately."""
    bytes: int
    """In and out."""
    kinds: dict[str, int] = field(default_factory=dict[str, int])
    """The operations by what they are of: linear, convolution, attention."""


def count_operations(model: nn.Module, case: Case) -> Counts:
    """One call, counted while it is made.

    Recurrent layers are not counted by torch's counter: their operations are those it sees, which may be none.
    """
    extra: dict[Any, Any] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *args, out_shape=None, **kw: (
            sdpa_flop_count(q, k, v)
        )
    }
    with FlopCounterMode(display=False, custom_mapping=extra) as counter:
        output = model(*case.args, **case.kwargs)
    moved = sum(
        leaf.nbytes
        for leaf in nested.leaves((case.args, case.kwargs, output))
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    )
    kinds: dict[str, int] = {}
    for operator, count in counter.get_flop_counts().get("Global", {}).items():
        name = str(operator)
        kind = "attention" if "attention" in name else "convolution" if "conv" in name else "linear"
        kinds[kind] = kinds.get(kind, 0) + count
    return Counts(operations=counter.get_total_flops(), bytes=moved, kinds=kinds)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The least that one call must move and compute."""

    bytes: float
    operations: dict[str, float]
    """Type that the products are in → operations, multiply and add apart."""


def point(
    case: str,
    seconds: float,
    work: Work,
    device: DeviceFacts,
    stage: Literal["original", "final"] = "final",
) -> RooflinePoint | None:
    """Return one call's place under the device's ceilings; None if a ceiling was not measured.

    A model whose calls touch only part of its weights (embedding tables, experts) can beat a bound that counts all
    weights.
    """
    rates = {kind: device.tflops.get(kind) for kind in work.operations}
    if not device.read_gb_per_s or not all(rates.values()):
        return None
    by_bytes = work.bytes / (device.read_gb_per_s * 1e9)
    by_operations = sum(count / ((rates[kind] or 0) * 1e12) for kind, count in work.operations.items())
    return RooflinePoint(
        case=case,
        stage=stage,
        dtype=max(work.operations, key=lambda kind: work.operations[kind]),
        bytes=round(work.bytes),
        operations=round(sum(work.operations.values())),
        seconds=seconds,
        bound_seconds=max(by_bytes, by_operations),
        bound_by="bytes" if by_bytes >= by_operations else "operations",
    )
