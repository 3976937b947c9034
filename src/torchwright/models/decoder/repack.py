"""Numbers of a quantized checkpoint as they are, in the layouts of the kernels: none is rounded a second time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from torchwright.core.scheme import FLOATS, INTEGERS, W4BF16, W8A8, Scheme, scheme_of
from torchwright.hardware.kernels.gpu import operators as gpu
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.hardware.kernels.pack_floats import packable
from torchwright.hub.weight import Floats, Grouped, Integers, SmallFloats, Weight

Kind = TypeVar("Kind", Grouped, Floats)


def repack(
    weights: Sequence[Weight],
    bias_N: torch.Tensor | None,
    scheme: Scheme,
    device: torch.device,
) -> PackedLinear | None:
    """The layer of `scheme` around the integers of weights that lie one below the other, or None where they do not fit.

    They fit where a row has one scale and its integers lie around zero: the layouts' scales of groups are whole
    multiples of the row's, and other groups' would have to be rounded to them.
    """
    grouped = _all(weights, Grouped)
    if not all(weight.bits == scheme.weight_bits and weight.group >= weight.shape[1] for weight in grouped):
        return None
    parts = [weight.part(0, weight.shape[0]) for weight in grouped]
    if not parts or any(part.zeros_NG is not None or part.least_NG is not None for part in parts):
        return None
    return PackedLinear.from_integers(
        torch.cat([part.integers_NK for part in parts]),
        torch.cat([part.scales_NG[:, 0] for part in parts]),
        bias_N,
        scheme,
        device=device,
    )


def repack_as_stored(
    weights: Sequence[Weight], bias_N: torch.Tensor | None, device: torch.device
) -> PackedLinear | None:
    """The layer that computes as the checkpoint means it: on inputs rounded as it rounds them, else on bfloat16 ones.

    None for weights of another kind, and where `_grouped` and `_floats` have none.
    """
    grouped, floats = _all(weights, Grouped), _all(weights, Floats)
    if grouped and all(weight.bits == 8 and weight.activations == 8 for weight in grouped):
        return repack(weights, bias_N, W8A8, device)
    if gpu.takes(device):
        return None
    if grouped:
        return _grouped(grouped, bias_N)
    return _floats(floats, bias_N) if floats else None


def _all(weights: Sequence[Weight], kind: type[Kind]) -> list[Kind]:
    """The weights if all are of a kind, else none."""
    found = [weight for weight in weights if isinstance(weight, kind)]
    return found if len(found) == len(weights) else []


def _grouped(weights: Sequence[Grouped], bias_N: torch.Tensor | None) -> PackedLinear | None:
    """None for inputs that are not in the order of their groups, and for groups that no layout has."""
    ordered = all(weight.group_of_K is None for weight in weights)
    group = _common_group(weights, W4BF16.groups)
    if group is None or not ordered:
        return None
    bits = max(weight.bits for weight in weights)
    name = next(name for name, scheme in INTEGERS.items() if scheme.weight_bits >= bits)
    scheme = scheme_of(name, group)
    each = [_parts(weight, group, scheme.weight_bits) for weight in weights]
    integers, scale, offset = (torch.cat(parts) for parts in zip(*each, strict=True))
    return PackedLinear.from_groups(integers, scale, offset, bias_N, scheme)


def _floats(weights: Sequence[Floats], bias_N: torch.Tensor | None) -> PackedLinear | None:
    """None for groups that no layout has, and for numbers that no kernel makes bfloat16."""
    bits = weights[0].bits
    scheme = next(scheme for scheme in FLOATS.values() if scheme.weight_bits == bits)
    group = _common_group(weights, scheme.groups)
    if group is None or any(weight.bits != bits for weight in weights):
        return None
    parts = [weight.part(0, weight.shape[0]) for weight in weights]
    scales = [
        part.scales_NG[:, _of_group(weight, group)] for part, weight in zip(parts, weights, strict=True)
    ]
    whole = SmallFloats(
        codes_NK=torch.cat([part.codes_NK for part in parts]), scales_NG=torch.cat(scales), bits=bits
    )
    return PackedLinear.from_floats(whole, bias_N, scheme_of(scheme.name, group)) if packable(whole) else None


def _common_group(weights: Sequence[Grouped] | Sequence[Floats], sizes: Sequence[int]) -> int | None:
    """The layouts' size of groups for all weights, None where they have no common one."""
    found = {_group(weight, sizes) for weight in weights}
    return found.pop() if len(found) == 1 else None


def _group(weight: Grouped | Floats, sizes: Sequence[int]) -> int | None:
    """The layouts' size of groups for a weight: its own, or the largest that divides it."""
    if weight.group >= weight.shape[1]:
        return max(sizes)
    return max((size for size in sizes if weight.group % size == 0), default=None)


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
    of_group = _of_group(weight, group)
    return integers, scale[:, of_group], offset[:, of_group]


def _of_group(weight: Grouped | Floats, group: int) -> torch.Tensor:
    """The weight's own group for each of the layout's."""
    return torch.arange(-(-weight.shape[1] // group)) * group // weight.group
