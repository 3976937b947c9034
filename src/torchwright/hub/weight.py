"""One tensor of a checkpoint: float rows, made a few at a time, and the integers that they come from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

BLOCK = 1 << 22
"""Numbers that are dequantized at a time, which bounds the memory used in addition to the weight's own."""


class Weight(Protocol):
    """A tensor by its shape and rows."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows `begin` to `end` of the first dimension, in a plain float type."""
        ...


@dataclass(frozen=True)
class Plain:
    """A tensor that is stored in a float type."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return self.tensor[begin:end]


@dataclass(frozen=True)
class Wide:
    """A tensor whose rows a format computes."""

    shape: tuple[int, ...]
    make: Callable[[int, int], torch.Tensor]

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return self.make(begin, end)


@dataclass(frozen=True, kw_only=True)
class Integers:
    """Some rows of a grouped weight: (integers − zeros) · scales − least, the last three one for each group."""

    integers_NK: torch.Tensor
    """int8 around zero, or uint8 where there are zeros or least values."""
    scales_NG: torch.Tensor
    zeros_NG: torch.Tensor | None = None
    least_NG: torch.Tensor | None = None

    @classmethod
    def of_unsigned(
        cls, values_NK: torch.Tensor, scales_NG: torch.Tensor, zeros_NG: torch.Tensor, bits: int
    ) -> Integers:
        """Build from uint8 values; zeros that all lie in the middle of the range give signed integers."""
        middle = 1 << (bits - 1)
        if bool((zeros_NG == middle).all()):
            return cls(integers_NK=(values_NK - middle).view(torch.int8), scales_NG=scales_NG)
        return cls(integers_NK=values_NK, scales_NG=scales_NG, zeros_NG=zeros_NG)


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """A weight (N, K) of whole numbers, `group` of them along the input with one scale; the last may be fewer."""

    shape: tuple[int, int]
    bits: int
    group: int
    part: Callable[[int, int], Integers]
    """From rows `begin` and `end`."""
    group_of_K: torch.Tensor | None = None
    """Each input's group, where they are not in order."""
    activations: int | None = None
    """Bits to which the format rounds each row of the input, where it does."""

    def rows(self, begin: int, end: int) -> torch.Tensor:
        found = self.part(begin, end)
        wide = found.integers_NK.float()
        if found.zeros_NG is not None:
            wide -= self._each(found.zeros_NG)
        wide *= self._each(found.scales_NG)
        return wide if found.least_NG is None else wide.sub_(self._each(found.least_NG))

    def _each(self, groups_NG: torch.Tensor) -> torch.Tensor:
        """The value of each input's group."""
        wide = groups_NG.float()
        if self.group_of_K is not None:
            return wide[:, self.group_of_K]
        return (
            wide if self.group >= self.shape[1] else wide.repeat_interleave(self.group, 1)[:, : self.shape[1]]
        )


def fill(out: torch.Tensor, weight: Weight) -> None:
    """Write a weight into a tensor of its shape, a block of rows at a time."""
    step = max(1, BLOCK // max(1, math.prod(weight.shape[1:])))
    for begin in range(0, len(out), step):
        end = min(begin + step, len(out))
        out[begin:end].copy_(weight.rows(begin, end))
