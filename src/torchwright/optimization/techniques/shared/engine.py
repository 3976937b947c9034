"""Shared code of techniques that hand the whole model to a third-party library."""

from __future__ import annotations

import importlib.util
from typing import Any

from torchwright.core.records import Coverage, DeviceFacts
from torchwright.optimization.techniques.base import Target

FLOAT32_GAIN = 1.5
"""The expected gain of an engine that computes in float32, or in float16 on a CPU: that of a compiler."""
REPLACED = frozenset(
    [
        "eager",
        "exportable",
        "float32",
        "floating",
        "float_weights",
        "layers",
        "linear",
        "convolution",
        "batch_norm",
        "sdpa",
    ]
)
"""Properties of a model that nothing can change any more once another library has taken it."""


def missing(engine: str, libraries: tuple[str, ...], device: DeviceFacts) -> str | None:
    """Why a library cannot take a model on this device, and what would mend that, or None. Imports none of them."""
    if device.kind != "cpu":
        return f"the engine '{engine}' is for CPUs; this device is {device.kind}"
    return uninstalled(engine, libraries)


def uninstalled(engine: str, libraries: tuple[str, ...]) -> str | None:
    """Which of the libraries is missing, and what brings it, or None. Imports none of them."""
    absent = [name for name in libraries if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return f"{' and '.join(absent)} cannot be imported: pip install 'torchwright[{engine}]'"


def writes(target: Target) -> str | None:
    """Why a library that gives answers alone cannot take this model, or None."""
    if "writes" in target.properties:
        return "the model changes its inputs or buffers in place; a converted graph gives answers alone"
    return None


def hand_over(target: Target, engine: str, kernel: str, **options: Any) -> None:
    """Have the whole model run by another library's engine, with its options."""
    target.settings.engine = engine
    target.settings.options = options
    total = sum(1 for _ in target.model.modules())
    target.coverage.append(Coverage(technique=engine, changed=total, total=total, kernel=kernel))
