"""The form of a trained model: calls to search by, other calls to judge by, and the metric of its task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

Inputs = tuple[torch.Tensor, ...]
Metric = Callable[[nn.Module], float]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model with its task. All calls have one shape.

    A metric is called with anything that takes the model's inputs, and keeps its own inputs and expected answers.
    """

    model: nn.Module
    search: list[Inputs]
    """Calls that calibrate, and by which a search judges."""
    search_metric: Metric
    held_out: list[Inputs]
    """Calls of other data, which nothing was chosen by."""
    held_out_metric: Metric
    higher_is_better: bool
    source: str
    """The packages of weights and inputs."""


class MissingPackage(RuntimeError):
    """A package with weights or inputs is not installed."""


def package_folder(name: str, package: str = "") -> Path:
    """Return the folder of an installed module without importing it. Raises `MissingPackage`."""
    from importlib.util import find_spec

    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise MissingPackage(f"{name} is not installed; `pip install {package or name}`")
    return Path(spec.origin).parent


@torch.inference_mode()
def answers(model: nn.Module, calls: list[Inputs]) -> torch.Tensor:
    """Return the model's first output for all calls, in float32, rows after each other."""
    return torch.cat([model(*call).float() for call in calls])
