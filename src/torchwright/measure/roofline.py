"""Operations and bytes of a call, and the time that the measured ceilings allow for them."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from torchwright.facts import CaseTime, DeviceFacts, RooflinePoint
from torchwright.workloads.base import Case


def count_operations(model: nn.Module, case: Case) -> dict[str, int]:
    """Operations (multiply and add apart) of matrix products, convolutions and attention; bytes in and out.

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
        for leaf in pytree.tree_leaves((case.args, case.kwargs, output))
        if isinstance(leaf, torch.Tensor)
    )
    return {"operations": counter.get_total_flops(), "bytes": moved}


def roofline_point(
    case: CaseTime,
    counts: dict[str, int],
    weight_bytes: int,
    dtype: str,
    device: DeviceFacts,
    stage: Literal["original", "final"],
) -> RooflinePoint | None:
    """One case against the device's ceilings; None where a ceiling was not measured.

    `weight_bytes` are read once a call; a model whose calls touch only part of its weights (embedding tables,
    experts) can beat this bound, which is then no bound.
    """
    rate = device.tflops.get(dtype)
    if not device.read_gb_per_s or not rate:
        return None
    moved = counts["bytes"] + weight_bytes
    by_bytes = moved / (device.read_gb_per_s * 1e9)
    by_operations = counts["operations"] / (rate * 1e12)
    return RooflinePoint(
        case=case.name,
        stage=stage,
        dtype=dtype,
        bytes=moved,
        operations=counts["operations"],
        seconds=case.seconds,
        bound_seconds=max(by_bytes, by_operations),
        bound_by="bytes" if by_bytes >= by_operations else "operations",
    )
