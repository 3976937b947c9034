"""Models made ready for engines of other libraries, and how far off these are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchwright.hardware.devices import get_device
from torchwright.hardware.devices.cpu import onednn_computes
from torchwright.optimization.engines.apply import make_target
from torchwright.optimization.engines.base import engines
from torchwright.optimization.techniques.base import from_step, parse_step
from torchwright.workloads.module import ModuleWorkload


def needs(step: str) -> None:
    """Skip where the library of a step is missing, or OpenVINO has no arithmetic in the bfloat16 that it asks for."""
    if reason := engines.get(step.partition(":")[0]).unavailable():
        pytest.skip(reason)
    if "bf16" in step and not onednn_computes("bfloat16"):
        pytest.skip("OpenVINO has no bf16 arithmetic on this processor")


def prepared(
    steps: list[str],
    model: nn.Module,
    *inputs: torch.Tensor,
    folder: Path | None = None,
    conversion: Path | None = None,
) -> Any:
    """The engine that the last step asks for, with a model; in `folder`, or run in this process."""
    for step in steps:
        if "bf16" in step:
            needs(step)
    target = make_target(ModuleWorkload(model, inputs), get_device("cpu").identify())
    target.conversion = conversion
    for step in steps:
        from_step(parse_step(step)).apply(target)
    return engines.get(target.settings.engine).prepare(target, folder)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
