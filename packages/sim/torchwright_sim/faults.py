"""Faults of the host's process: those of a device happen in its own (`process.py`, `evaluation.py`)."""

from __future__ import annotations

import os

from torchwright_sim import settings

_operators: dict[str, int] = {}
_calls: dict[str, int] = {}


def start(chosen: settings.Settings) -> None:
    """Have the operators fail that the settings name, and allocations."""
    import torch

    _operators.update(
        {name: first for name, (kind, first) in chosen.on_operators().items() if kind == "abort"}
    )
    for fault in chosen.faults:
        if fault.kind == "oom" and fault.device is not None:
            torch.ops.sim._fail_allocation(fault.device, fault.at)


def on_host(operator: str) -> None:
    """End this process if the operator is one that was asked to, as a driver's crash does."""
    if not _operators or operator not in _operators:
        return
    _calls[operator] = _calls.get(operator, 0) + 1
    if _calls[operator] >= _operators[operator]:
        os.abort()
