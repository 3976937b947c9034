"""Equalize the input features of linear layers before both operands are rounded to 8 bits: SmoothQuant.

One step serves all features of an input. Where a few are far larger than the rest, as after the norms of transformers,
the step is too coarse for the others. Each feature is divided by a scale, and the weight's column multiplied by it: the
function stays, and a weight with a step per output channel is easier to round (Xiao et al., 2023). The division is a
multiplication of the input, which compilers join with the norm before the layer. No norm has to be changed, and other
readers of the norm's output see no difference.

A layer is smoothed if its output's error on calibration rows, both operands rounded, is clearly smaller.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchwright.optimization.techniques.shared.int8 import (
    STEPS,
    activation_range,
    round_weight,
)

STRENGTHS = (0.35, 0.5, 0.65, 0.8, 0.95)
"""Shares of the features' ranges that move to the weights (SmoothQuant's alpha); each layer takes the best."""
WORTH = 0.8
"""The largest share of a layer's error that may remain: the multiplication costs time where no norm is before it."""
PER_CALL, ROWS = 32, 128
"""Rows that are put to the test, of each call and in all. Half of them choose a strength, the others accept it."""
ENOUGH = 32
"""Rows from which a layer is smoothed: of fewer the range of a single feature is a guess, and cuts other inputs."""
SMALLEST = 1e-5
"""Columns of smaller weights have scales as if they were this large."""


class Ranges:
    """The least and the largest value of each input feature."""

    def __init__(self, features: int) -> None:
        self.low_K, self.high_K = torch.full((features,), math.inf), torch.full((features,), -math.inf)

    def add(self, rows_RK: torch.Tensor) -> None:
        if len(rows_RK):
            low_K, high_K = rows_RK.aminmax(dim=0)
            self.low_K, self.high_K = torch.minimum(self.low_K, low_K), torch.maximum(self.high_K, high_K)

    def divided(self, scales_K: torch.Tensor) -> tuple[float, int]:
        """Return (scale, zero point) of an input that is divided by these scales."""
        return activation_range((self.low_K / scales_K).min().item(), (self.high_K / scales_K).max().item())


class Features:
    """The input features of a linear layer over calibration calls.

    Every second row is put to the test: unseen rows have values beyond the ranges that calibration found, most of all
    where each feature has a range of its own. A choice by the rows of the ranges themselves does not see that.
    """

    def __init__(self, features: int) -> None:
        self.all, self.half = Ranges(features), Ranges(features)
        """The ranges of all rows, and those of the rows that are not put to the test."""
        self.tested: list[torch.Tensor] = []
        """Some of those that are, in parts of (R, K)."""
        self.seen = 0
        """Rows of all calls."""

    def add(self, rows_RK: torch.Tensor) -> None:
        odd = self.seen % 2
        self.seen += len(rows_RK)
        self.all.add(rows_RK)
        self.half.add(rows_RK[odd::2])
        if sum(map(len, self.tested)) < ROWS:
            others_RK = rows_RK[1 - odd :: 2]
            self.tested.append(others_RK[:: max(1, len(others_RK) // PER_CALL)][:PER_CALL].clone())


def rounded_rows(rows_RK: torch.Tensor, ranges: Ranges, scales_K: torch.Tensor) -> torch.Tensor:
    """Divide input rows by the scales, and round them to 8 bits."""
    step, zero = ranges.divided(scales_K)
    return ((torch.round(rows_RK / scales_K / step) + zero).clamp(0, STEPS) - zero) * step


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
            self._features[layer] = Features(x.shape[-1])
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
        return self._features[layer].all.divided(smooth.scales_K)

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
    known, ranges = features.half, features.all
    if features.seen < ENOUGH or not (ranges.low_K.isfinite() & ranges.high_K.isfinite()).all():
        return None
    rows_RK = torch.cat(features.tested)
    weight_NK = torch.cat([weight.detach().float() for weight in weights])
    exact_RN = rows_RK @ weight_NK.T

    def errors_R(scales_K: torch.Tensor) -> torch.Tensor:
        rounded_RK = rounded_rows(rows_RK, known, scales_K)
        error_RN = rounded_RK @ round_weight(weight_NK * scales_K).T - exact_RN
        return (error_RN - error_RN.mean(0)).square().sum(1)  # the bias takes the mean back

    plain = errors_R(torch.ones_like(known.low_K))
    errors = [errors_R(scales_of(weight_NK, known, strength)) for strength in STRENGTHS]
    best = min(range(len(errors)), key=lambda place: errors[place][::2].sum().item())
    is_worth_it = errors[best][1::2].sum() < WORTH**2 * plain[1::2].sum()
    return scales_of(weight_NK, ranges, STRENGTHS[best]) if is_worth_it else None


def scales_of(weight_NK: torch.Tensor, ranges: Ranges, strength: float) -> torch.Tensor:
    """Return SmoothQuant's scales, the smallest being 1.

    A feature that is quiet in the calibration calls has the room of a typical one.
    """
    ranges_K = torch.maximum(ranges.high_K, -ranges.low_K)
    ranges_K = ranges_K.clamp_min(ranges_K.median()).clamp_min(SMALLEST)
    columns_K = weight_NK.abs().amax(0).clamp_min(SMALLEST)
    scales_K = ranges_K**strength / columns_K ** (1 - strength)
    return scales_K / scales_K.min()
