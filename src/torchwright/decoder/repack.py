"""Integers of a quantized checkpoint as they are, in the layouts of the kernels: no number is rounded a second time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchwright.hub.weight import Grouped
from torchwright.kernels.linear import PackedLinear
from torchwright.kernels.pack import GROUPS

BITS = {"w8a8": 8, "w4a8": 4, "w4a16": 4}
"""Of a scheme's weights."""


def repack(
    weights: Sequence[Grouped], bias_N: torch.Tensor | None, scheme: str, group_size: int, device: torch.device
) -> PackedLinear | None:
    """The layer of `scheme` around the integers of weights that lie one below the other, or None where they do not fit.

    They fit where a row has one scale and its integers lie around zero: the layouts' scales of groups are whole
    multiples of the row's, and other groups' would have to be rounded to them.
    """
    if not all(weight.bits == BITS[scheme] and _by_row(weight) for weight in weights):
        return None
    parts = [weight.part(0, weight.shape[0]) for weight in weights]
    if any(part.zeros_NG is not None or part.least_NG is not None for part in parts):
        return None
    return PackedLinear.from_integers(
        torch.cat([part.integers_NK for part in parts]),
        torch.cat([part.scales_NG[:, 0] for part in parts]),
        bias_N,
        scheme,
        group_size=group_size,
        device=device,
    )


def repack_as_stored(
    weights: Sequence[Grouped], bias_N: torch.Tensor | None, device: torch.device
) -> PackedLinear | None:
    """The layer that computes as the checkpoint means it: with float inputs, or rounded as it rounds them."""
    if all(weight.bits == 8 and weight.activations == 8 for weight in weights):
        return repack(weights, bias_N, "w8a8", GROUPS[0], device)
    return None


def _by_row(weight: Grouped) -> bool:
    return weight.group >= weight.shape[1]
