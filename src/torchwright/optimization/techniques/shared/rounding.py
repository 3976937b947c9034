"""Round a layer's weights to 8 bits for the least error of its output; the mean of the error goes to the bias.

With rounding errors d of a channel's weights, the error at an input x (of a convolution: a patch) is the product d·x.
Its mean over inputs is a constant, which a bias takes back at no cost: bias correction (Nagel et al., 2019). What
remains has the mean square d·C·d, with the covariance C of inputs. Nearest rounding ignores C: where inputs go up and
down together, as the nine pixels of a depthwise convolution do, their errors add up. GPTQ (Frantar et al., 2023) rounds
one weight after another, and each makes up for the errors of those before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.hardware.kernels import gptq
from torchwright.optimization.techniques.shared.int8 import LAYERS, RoundedWeight, largest_weight
from torchwright.optimization.techniques.shared.own_padding import PaddedConv2d

ROWS, PLACES = 4096, 1024
"""Most rows of a call that are counted for a linear layer, and most patches for a convolution, which has fewer weights
for each number: more change the covariance by less than a hundredth."""
LARGEST_CONVOLUTION, LARGEST_LINEAR = 64, 2048
"""Most weights of a channel for which a covariance is kept. Errors of more weights of a convolution average out:
EfficientNet-Lite0's graph loses 8.7% by the nearest, 7.9% so, and 8.1% with all layers so. Features of linear layers go
together: MiniLM's error is 5.8% by the nearest and 4.4% so, with 7-bit weights 9.0% and 6.0%. Beyond 2,048 weights the
factorization of one layer, in K³ operations, takes a second of a core and more."""
SMALL = 64
"""Most weights of a channel for which sums are in float64, and other scales are tried."""
SCALES = 8
"""Scales that are tried for each channel, each with another rounding: an eighth larger at most. Of more than `SMALL`
weights one is tried: eight take six times as long, and MiniLM's error is 4.37% in place of 4.46%."""
BLOCK = 128
"""Weights of a channel that are rounded before the others are corrected for them by one matrix product."""


class Moments:
    """Mean and covariance of the patches that one layer multiplies by its weights, for each group of channels.

    Without a covariance if a channel has too many weights for the kind of layer.
    """

    def __init__(self, *, convolves: bool) -> None:
        self.convolves, self.count = convolves, 0
        self._centre: Any = None
        self._sum: Any = 0.0
        self._products: Any = 0.0

    def add(self, patches_GRK: torch.Tensor) -> None:
        patches = patches_GRK.float()
        if self._centre is None:  # near the mean, so that the difference of squares keeps its digits
            self._centre = patches.mean(1, keepdim=True)
        patches = patches - self._centre
        self.count += patches.shape[1]
        self._sum = self._sum + patches.sum(1).double()
        if patches.shape[2] <= (LARGEST_CONVOLUTION if self.convolves else LARGEST_LINEAR):
            products = patches.mT @ patches
            self._products = self._products + (products.double() if patches.shape[2] <= SMALL else products)

    @property
    def mean_GK(self) -> torch.Tensor:
        return self._centre[:, 0].double() + self._sum / self.count

    def divided(self, scales_K: torch.Tensor) -> Moments:
        """Return the moments of the patches divided by these numbers."""
        found, scales = Moments(convolves=self.convolves), scales_K.double()
        found.count, found._centre = self.count, self._centre / scales_K
        found._sum = self._sum / scales
        if isinstance(self._products, torch.Tensor):
            found._products = self._products / (scales[:, None] * scales).to(self._products.dtype)
        return found

    @property
    def covariance_GKK(self) -> torch.Tensor | None:
        """None if a channel has too many weights; in float32 if it has more than `SMALL`."""
        if not isinstance(self._products, torch.Tensor):
            return None
        mean_GK = (self._sum / self.count).to(self._products.dtype)
        return self._products / self.count - mean_GK[:, :, None] * mean_GK[:, None, :]


class Calibrated:
    """Gathers the moments of layers' inputs over calibration calls, and rounds the layers' weights by them."""

    def __init__(self) -> None:
        self._moments: dict[nn.Module, Moments] = {}

    def watch(self, layer: Any, x: torch.Tensor) -> None:
        """Count a call of a plain linear layer or convolution on `x`; other layers are passed over."""
        if type(layer) not in LAYERS or getattr(layer, "padding_mode", "zeros") != "zeros":
            return
        if isinstance(getattr(layer, "padding", 0), str):
            return
        moments = self._moments.setdefault(layer, Moments(convolves=isinstance(layer, nn.Conv2d)))
        moments.add(patches_of(layer, x.detach()))

    def rounded(self, layer: Any, scales_K: torch.Tensor | None = None) -> RoundedWeight | None:
        """Return the layer's weight in 8 bits; None for a layer without calls, or with NaN or infinity in them.

        With `scales_K` the layer's input is divided by them, and the weight is multiplied before it is rounded.
        """
        moments = self._moments.pop(layer, None)
        if moments is None or not moments.mean_GK.isfinite().all():
            return None
        weight = layer.weight.detach()
        if scales_K is None:
            return rounded_weight(weight, moments)
        return rounded_weight(weight.float() * scales_K, moments.divided(scales_K))


def rounded_weight(weight: torch.Tensor, moments: Moments) -> RoundedWeight:
    """Round a linear layer's or convolution's weight for inputs of these moments."""
    groups = len(moments.mean_GK)
    weight_GNK = weight.float().reshape(groups, len(weight) // groups, -1)
    integers_GNK, scale_GN = round_by(weight_GNK, moments, largest_weight())
    return RoundedWeight(
        integers=integers_GNK.reshape(weight.shape),
        scale=scale_GN.flatten(),
        shift=mean_error(weight_GNK, integers_GNK, scale_GN, moments),
    )


def mean_error(
    weight_GNK: torch.Tensor, integers_GNK: torch.Tensor, scale_GN: torch.Tensor, moments: Moments
) -> torch.Tensor:
    """Return the mean of what rounding takes from each output channel."""
    missing_GNK = weight_GNK.double() - integers_GNK * scale_GN[..., None]
    return (missing_GNK @ moments.mean_GK[..., None]).flatten().float()


def patches_of(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return (groups, rows, weights of a channel): what a layer multiplies by its weights, of many rows only some."""
    if not isinstance(layer, nn.Conv2d):
        return linear_patches(x)
    padding: Any = layer.padding
    if isinstance(layer, PaddedConv2d):
        x = F.pad(x, layer.zeros.around(x.shape[-2:]))
    return convolution_patches(
        x if x.dim() == 4 else x[None],
        layer.kernel_size,
        stride=layer.stride,
        padding=[(pad, pad) for pad in padding],
        dilation=layer.dilation,
        groups=layer.groups,
    )


def linear_patches(x: torch.Tensor) -> torch.Tensor:
    """Return the rows of `x`, of many rows only some, as one group."""
    rows = x.reshape(-1, x.shape[-1])
    return rows[None, :: max(1, round(len(rows) / ROWS))]


def convolution_patches(
    x: torch.Tensor,
    kernel: Sequence[int],
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """Return the patches of (batch, channels, places …), of many only those in the places of a grid."""
    patches = F.pad(x, [size for sides in reversed(padding) for size in sides])
    for axis, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        patches = patches.unfold(axis, (size - 1) * gap + 1, step)[..., ::gap]
    dims = len(kernel)
    places = patches.movedim(1, dims + 1)  # (batch, places …, channels, kernel …)
    thin = max(1, round((math.prod(places.shape[: dims + 1]) / PLACES) ** (1 / dims)))
    places = places[(slice(None), *[slice(None, None, thin)] * dims)]
    return places.reshape(-1, groups, x.shape[1] // groups * math.prod(kernel)).transpose(0, 1)


def round_by(
    weight_GNK: torch.Tensor, moments: Moments, largest: int, scales: int = SCALES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers (G, N, K) up to ±`largest` and scales (G, N), of a few roundings those of the least error."""
    first_GN = weight_GNK.abs().amax(2).clamp_min(1e-12) / largest
    best, covariance = _nearest(weight_GNK, first_GN, largest), moments.covariance_GKK
    if covariance is None or not covariance.isfinite().all():
        return best, first_GN
    scales = scales if weight_GNK.shape[2] <= SMALL else 1
    factors_S = 1 + torch.arange(scales) / (8 * scales)
    scale_SGN = factors_S[:, None, None] * first_GN
    damping = max(
        gptq.DAMPING, weight_GNK.shape[2] / moments.count
    )  # few patches say little of the covariance
    found_SGNK = _gptq(weight_GNK, gptq.influence(covariance, damping), scale_SGN, largest)
    scale_SGN = torch.cat([first_GN[None], scale_SGN])
    found_SGNK = torch.cat([best[None], found_SGNK])
    missing_SGNK = weight_GNK.to(covariance.dtype) - found_SGNK * scale_SGN[..., None].to(covariance.dtype)
    least = ((missing_SGNK @ covariance) * missing_SGNK).sum(-1).argmin(0, keepdim=True)
    return found_SGNK.take_along_dim(least[..., None], 0)[0], scale_SGN.take_along_dim(least, 0)[0]


def _nearest(weight_GNK: torch.Tensor, scale_GN: torch.Tensor, largest: int) -> torch.Tensor:
    return torch.round(weight_GNK / scale_GN[..., None]).clamp_(-largest, largest).to(torch.int8)


def _gptq(
    weight_GNK: torch.Tensor, upper_GKK: torch.Tensor, scale_SGN: torch.Tensor, largest: int
) -> torch.Tensor:
    """Round the weights to steps of each of these scales, one input after another."""
    wide_SGKN = weight_GNK.mT.expand(len(scale_SGN), *weight_GNK.mT.shape).clone()
    integers_SGKN, errors_SGKN = torch.empty_like(wide_SGKN), torch.empty_like(wide_SGKN)
    for first in range(0, wide_SGKN.shape[2], BLOCK):
        block = slice(first, first + BLOCK)
        for k in range(wide_SGKN.shape[2])[block]:
            weights, inner = wide_SGKN[:, :, k], slice(k + 1, first + BLOCK)
            integers = torch.round(weights / scale_SGN).clamp_(-largest, largest)
            error = (weights - integers * scale_SGN) / upper_GKK[:, k, k, None]
            integers_SGKN[:, :, k], errors_SGKN[:, :, k] = integers, error
            wide_SGKN[:, :, inner] -= upper_GKK[:, k, inner, None] * error[:, :, None]
        others = slice(first + BLOCK, None)
        wide_SGKN[:, :, others] -= upper_GKK[:, block, others].mT @ errors_SGKN[:, :, block]
    return integers_SGKN.mT.to(torch.int8)
