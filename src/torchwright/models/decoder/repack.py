"""Integers of a quantized checkpoint as they are, in the layouts of the kernels: no number is rounded a second time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchwright.core.scheme import KEPT, W8A8, Scheme, scheme_of
from torchwright.hardware.kernels.gpu import operators as gpu
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.hub.weight import Grouped, Integers


def repack(
    weights: Sequence[Grouped],
    bias_N: torch.Tensor | None,
    scheme: Scheme,
    device: torch.device,
) -> PackedLinear | None:
    """The layer of `scheme` around the integers of weights that lie one below the other, or None where they do not fit.

    They fit where a row has one scale and its integers lie around zero: the layouts' scales of groups are whole
    multiples of the row's, and other groups' would have to be rounded to them.
    """
    if not all(weight.bits == scheme.weight_bits and weight.group >= weight.shape[1] for weight in weights):
        return None
    parts = [weight.part(0, weight.shape[0]) for weight in weights]
    if any(part.zeros_NG is not None or part.least_NG is not None for part in parts):
        return None
    return PackedLinear.from_integers(
        torch.cat([part.integers_NK for part in parts]),
        torch.cat([part.scales_NG[:, 0] for part in parts]),
        bias_N,
        scheme,
        device=device,
    )


def repack_as_stored(
    weights: Sequence[Grouped], bias_N: torch.Tensor | None, device: torch.device
) -> PackedLinear | None:
    """The layer that computes as the checkpoint means it: on inputs rounded as it rounds them, else on bfloat16 ones.

    None for inputs that are not in the order of their groups, for groups that no layout has, and on GPUs.
    """
    if all(weight.bits == 8 and weight.activations == 8 for weight in weights):
        return repack(weights, bias_N, W8A8, device)
    sizes = {_group(weight) for weight in weights}
    ordered = all(weight.group_of_K is None for weight in weights)
    if len(sizes) > 1 or None in sizes or not ordered or gpu.takes(device):
        return None
    group = next(size for size in sizes if size)
    bits = max(weight.bits for weight in weights)
    name = next(name for name, scheme in KEPT.items() if scheme.weight_bits >= bits)
    scheme = scheme_of(name, group)
    each = [_parts(weight, group, scheme.weight_bits) for weight in weights]
    integers, scale, offset = (torch.cat(parts) for parts in zip(*each, strict=True))
    return PackedLinear.from_groups(integers, scale, offset, bias_N, scheme)


def _group(weight: Grouped) -> int | None:
    """The layouts' size of groups for a weight: its own, or the largest that divides it."""
    sizes = next(iter(KEPT.values())).groups
    if weight.group in sizes:
        return weight.group
    widest = sizes[-1]
    return widest if weight.group >= weight.shape[1] or weight.group % widest == 0 else None


def _parts(weight: Grouped, group: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers from 0 on, and each group's scale and offset."""
    found: Integers = weight.part(0, weight.shape[0])
    scale, integers = found.scales_NG.float(), found.integers_NK
    if integers.dtype == torch.int8:
        middle = 1 << (bits - 1)
        integers, offset = (integers + middle).view(torch.uint8), -middle * scale
    else:
        offset = torch.zeros_like(scale)
    if found.zeros_NG is not None:
        offset = offset - found.zeros_NG.float() * scale
    if found.least_NG is not None:
        offset = offset - found.least_NG
    of_group = torch.arange(-(-weight.shape[1] // group)) * group // weight.group
    return integers, scale[:, of_group], offset[:, of_group]
