"""LPIPS (Zhang et al. 2018): how far apart two pictures look to AlexNet, as the package `lpips` 0.1 weighs its layers.

The package and the backbone's weights are the user's; neither is downloaded, and of the package no code is run: it
would import torchvision. Both files are opened by torch with `weights_only`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from torchwright.core.errors import first_line

BACKBONE = "alexnet-owt-7be5be79.pth"
"""torchvision's name for the file that `alexnet(weights="IMAGENET1K_V1")` downloads."""
LAYERS = ((0, 4, 2), (3, 1, 2), (6, 1, 1), (8, 1, 1), (10, 1, 1))
"""Number among AlexNet's `features`, stride and padding of each convolution; the second and third follow a pooling."""
POOLED = (3, 6)
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""Normalization of red, green and blue, for pictures from -1 to 1."""
SMALLEST = 31
"""Pixels of a side that leave AlexNet's last layers one place."""
LARGEST_FILE = 2**30


@dataclass(frozen=True)
class Backbone:
    """AlexNet's five convolutions as (weight, bias), and how much each of their channels counts."""

    convolutions: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    weights: tuple[torch.Tensor, ...]


def lpips(backbone: Backbone, before_N3HW: torch.Tensor, after_N3HW: torch.Tensor) -> torch.Tensor:
    """Return the LPIPS of each pair of pictures from 0 to 1: (N,) float32, 0 if they are equal."""
    found_N = torch.zeros(len(before_N3HW))
    pairs = zip(
        _features(backbone, before_N3HW), _features(backbone, after_N3HW), backbone.weights, strict=True
    )
    for before, after, weight_1C11 in pairs:
        found_N += F.conv2d((_unit(before) - _unit(after)) ** 2, weight_1C11).mean((1, 2, 3))
    return found_N


def _features(backbone: Backbone, pictures_N3HW: torch.Tensor) -> list[torch.Tensor]:
    shift, scale = (torch.tensor(value).view(1, 3, 1, 1) for value in (SHIFT, SCALE))
    x, found = (2 * pictures_N3HW.float() - 1 - shift) / scale, []
    for (number, stride, padding), (weight, bias) in zip(LAYERS, backbone.convolutions, strict=True):
        if number in POOLED:
            x = F.max_pool2d(x, 3, stride=2)
        x = F.relu(F.conv2d(x, weight, bias, stride=stride, padding=padding))
        found.append(x)
    return found


def _unit(features_NCHW: torch.Tensor) -> torch.Tensor:
    """Normalize features to length 1 at each position, as the package does: zeros stay zeros."""
    return features_NCHW / (features_NCHW.norm(dim=1, keepdim=True) + 1e-10)


def find_backbone(sides: tuple[int, int]) -> Backbone | str:
    """Return the weights that `lpips` needs for pictures of these sides, or the reason why they are missing."""
    if min(sides) < SMALLEST:
        return f"LPIPS needs sides of {SMALLEST} pixels"
    found = importlib.util.find_spec("lpips")
    if found is None or found.origin is None:
        return "the package lpips is not installed"
    backbone = Path(torch.hub.get_dir()) / "checkpoints" / BACKBONE
    if not backbone.is_file():
        return f"AlexNet's weights ({BACKBONE}) are not in torchvision's cache, and nothing is downloaded"
    return _read(Path(found.origin).parent / "weights" / "v0.1" / "alex.pth", backbone)


@cache
def _read(linear: Path, backbone: Path) -> Backbone | str:
    try:
        weights, network = _tensors(linear), _tensors(backbone)
        return Backbone(
            tuple((network[f"features.{i}.weight"], network[f"features.{i}.bias"]) for i, *_ in LAYERS),
            tuple(weights[f"lin{i}.model.1.weight"] for i in range(len(LAYERS))),
        )
    except Exception as error:  # whatever a damaged file brings torch to say
        return f"LPIPS' weights cannot be read ({type(error).__name__}: {first_line(error)})"


def _tensors(path: Path) -> dict[str, Any]:
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path.name} is larger than {LARGEST_FILE:,} bytes")
    return torch.load(path, map_location="cpu", weights_only=True)
