"""Equalize the input features of linear layers before both operands are rounded to 8 bits: SmoothQuant.

One step serves all features of an input. Where a few are far larger than the rest, as after the norms of transformers,
the step is too coarse for the others. Each feature is divided by a scale, and the weight's column multiplied by it: the
function stays, and a weight with a step per output channel is easier to round (Xiao et al., 2023). The division is a
multiplication of the input, which compilers join with the norm before the layer. No norm has to be changed, and other
readers of the norm's output see no difference.

A layer is smoothed if its output's error on calibration rows, both operands rounded, is clearly smaller.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchwright.optimization.techniques.shared.int8 import (
    activation_range,
    largest_activation,
    round_weight,
)

STRENGTHS = (0.35, 0.5, 0.65, 0.8, 0.95)
"""Shares of the features' ranges that move to the weights (SmoothQuant's alpha); each layer takes the best."""
WORTH = 0.8
"""The largest share of a layer's error that may remain: the multiplication costs time where no norm is before it."""
PER_CALL, ROWS = 32, 128
"""Input rows that a layer keeps of each call and in all. Half of them choose a strength, the others accept it."""
ENOUGH = 32
"""Rows from which a layer is smoothed: of fewer the range of a single feature is a guess, and cuts other inputs."""
SMALLEST = 1e-5
"""Columns of smaller weights have scales as if they were this large."""


@dataclass(kw_only=True)
class Features:
    """The input features of a linear layer over calibration calls: their ranges, and some rows."""

    low_K: torch.Tensor
    high_K: torch.Tensor
    rows: list[torch.Tensor] = field(default_factory=list)
    """Parts of (R, K)."""
    seen: int = 0
    """Rows that the ranges are of."""

    def add(self, rows_RK: torch.Tensor) -> None:
        self.seen += len(rows_RK)
        low_K, high_K = rows_RK.aminmax(dim=0)
        self.low_K, self.high_K = torch.minimum(self.low_K, low_K), torch.maximum(self.high_K, high_K)
        if sum(map(len, self.rows)) < ROWS:
            self.rows.append(rows_RK[:: max(1, len(rows_RK) // PER_CALL)][:PER_CALL].clone())


def smoothed_range(features: Features, scales_K: torch.Tensor) -> tuple[float, int]:
    """Return (scale, zero point) of an input that is divided by these scales."""
    return activation_range(
        (features.low_K / scales_K).min().item(), (features.high_K / scales_K).max().item()
    )


def rounded_rows(rows_RK: torch.Tensor, features: Features, scales_K: torch.Tensor) -> torch.Tensor:
    """Divide input rows by the scales, and round them to 8 bits."""
    divided_RK, top = rows_RK / scales_K, largest_activation()
    step, zero = smoothed_range(features, scales_K)
    return ((torch.round(divided_RK / step) + zero).clamp(0, top) - zero) * step


class Smooth(nn.Module):
    """Multiply each feature of an input (..., K) by a factor of at most 1: what is finite stays finite.

    Layers that read one value have one module, so that the value is multiplied once (`share_integers`).
    """

    factor: torch.Tensor

    def __init__(self, scales_K: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("factor", (1 / scales_K).to(dtype))

    @property
    def scales_K(self) -> torch.Tensor:
        """The factors of the weight's columns: exactly the inverse of the input's in their own type."""
        return 1 / self.factor.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor.to(x.dtype)


class Smoothing:
    """Gathers the inputs of linear layers over calibration calls, and finds which layers to smooth."""

    def __init__(self) -> None:
        self._features: dict[nn.Module, Features] = {}
        self._readers: dict[nn.Module, list[Any]] = {}
        """Layer → the layers that read the value it read in its first call."""
        self._values: dict[int, tuple[weakref.ref[torch.Tensor], list[Any]]] = {}
        self._found: dict[int, Smooth | None] = {}

    def watch(self, layer: Any, x: torch.Tensor) -> None:
        """Count a call of a plain linear layer on `x`; other layers are passed over."""
        if type(layer) is not nn.Linear or not x.numel():
            return
        rows_RK = x.detach().float().reshape(-1, x.shape[-1])
        if layer not in self._features:
            low_K, high_K = rows_RK.aminmax(dim=0)
            self._features[layer] = Features(low_K=low_K, high_K=high_K)
            self._readers[layer] = self._readers_of(x)
            self._readers[layer].append(layer)
        self._features[layer].add(rows_RK)

    def found(self, layer: nn.Module) -> Smooth | None:
        """Return what multiplies the layer's input; None if that gains too little."""
        readers = self._readers.get(layer)
        if readers is None:
            return None
        if id(readers) not in self._found:
            weights = [each.weight for each in readers]
            scales_K = best_scales(weights, self._features[layer])
            self._found[id(readers)] = None if scales_K is None else Smooth(scales_K, weights[0].dtype)
        return self._found[id(readers)]

    def activation(self, layer: nn.Module, smooth: Smooth) -> tuple[float, int]:
        """Return (scale, zero point) of the layer's multiplied input."""
        return smoothed_range(self._features[layer], smooth.scales_K)

    def _readers_of(self, x: torch.Tensor) -> list[Any]:
        """Return the layers that have read this tensor so far. Another may have its address later."""
        value, readers = self._values.get(id(x), (None, []))
        if value is None or value() is not x:
            readers = []
            self._values[id(x)] = weakref.ref(x), readers
        return readers


def smooth_of(layer: Any, x: torch.Tensor) -> Smooth | None:
    """Return what would multiply the input of a linear layer that was calibrated by `x` alone."""
    smoothing = Smoothing()
    smoothing.watch(layer, x)
    return smoothing.found(layer)


def best_scales(weights: Sequence[torch.Tensor], features: Features) -> torch.Tensor | None:
    """Return the scales (K,), 1 at least, for layers of these weights (N, K) that read these features.

    None if the error does not shrink to `WORTH`.
    """
    rows_RK = torch.cat(features.rows)
    if features.seen < ENOUGH or not (features.low_K.isfinite() & features.high_K.isfinite()).all():
        return None
    weight_NK = torch.cat([weight.detach().float() for weight in weights])
    exact_RN = rows_RK @ weight_NK.T

    def errors_R(scales_K: torch.Tensor) -> torch.Tensor:
        rounded_RK = rounded_rows(rows_RK, features, scales_K)
        error_RN = rounded_RK @ round_weight(weight_NK * scales_K).T - exact_RN
        return (error_RN - error_RN.mean(0)).square().sum(1)  # the bias takes the mean back

    plain = errors_R(torch.ones_like(features.low_K))
    found = [scales_of(weight_NK, features, strength) for strength in STRENGTHS]
    errors = [errors_R(scales_K) for scales_K in found]
    best = min(range(len(found)), key=lambda place: errors[place][::2].sum().item())
    is_worth_it = errors[best][1::2].sum() < WORTH**2 * plain[1::2].sum()
    return found[best] if is_worth_it else None


def scales_of(weight_NK: torch.Tensor, features: Features, strength: float) -> torch.Tensor:
    """Return SmoothQuant's scales, the smallest being 1.

    A feature that is quiet in the calibration calls has the room of a typical one.
    """
    ranges_K = torch.maximum(features.high_K, -features.low_K)
    ranges_K = ranges_K.clamp_min(ranges_K.median()).clamp_min(SMALLEST)
    columns_K = weight_NK.abs().amax(0).clamp_min(SMALLEST)
    scales_K = ranges_K**strength / columns_K ** (1 - strength)
    return scales_K / scales_K.min()
