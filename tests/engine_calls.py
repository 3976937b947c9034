"""Models behind a call dispatcher without a search: exported, compiled or run operator by operator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchwright.optimization.engines.compiled.graphs import GraphCall
from torchwright.optimization.engines.compiled.package import Package
from torchwright.optimization.engines.compiled.program import FreeSizes, compile_program, export_one
from torchwright.optimization.engines.dispatch.call import parameters_of, spec_of
from torchwright.optimization.engines.dispatch.call_dispatcher import CallDispatcher, CompiledCall
from torchwright.optimization.engines.dispatch.spec import InputCapabilities
from torchwright.workloads.base import Case

FORMS = ["graph", pytest.param("package", marks=pytest.mark.slow)]
"""Calls as graphs, and as packages that a C++ compiler takes 12 s for."""


class Calls(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def call_of(
    model: nn.Module, args: Any, kwargs: Any = None, *, free: FreeSizes | None = None, to: Path | None = None
) -> CompiledCall:
    """One call, compiled into the package `to`; without one run operator by operator."""
    program = export_one(model.eval(), Case("forward", args=args, kwargs=kwargs or {}), free)
    spec = spec_of("forward", program)
    if to is None:
        return GraphCall(program, spec)
    compile_program(program, to, {})
    return Package(to, spec)


def dispatcher_of(
    model: nn.Module,
    *args: Any,
    to: Path | None = None,
    free: FreeSizes | None = None,
    takes: dict[str, Any] | None = None,
    named: dict[str, Any] | None = None,
    **options: Any,
) -> CallDispatcher:
    known = InputCapabilities(parameters=parameters_of(model.forward), **(takes or {}))
    return CallDispatcher([call_of(model, args, named, free=free, to=to)], takes=known, **options)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8)).eval()


class Picture(nn.Module):
    """Channels-last inside; answers in several layouts, with a constant and a number between its tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, flag: bool = True, text: Any = torch.float32):
        h = self.conv(x).to(memory_format=torch.channels_last)
        return {
            "last": h,
            "none": None,
            "three": 3,
            "pair": (x.transpose(1, 2) * 2, scale),
            "rows": len(x),
            "part": scale[1:],
            "flat": (h * 2).contiguous(),
        }
