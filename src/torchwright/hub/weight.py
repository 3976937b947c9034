"""One tensor of a checkpoint: float rows, made a few at a time, and the small numbers that they come from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
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


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The 4-bit float of each three low bits; the highest bit is the sign."""
BIAS = 127
"""The byte of an exponent that stands for 1."""


@dataclass(frozen=True, kw_only=True)
class SmallFloats:
    """Some rows of a weight of small floats."""

    codes_NK: torch.Tensor
    """uint8, each with the bits of one float: e2m1 where there are 4 of them, e4m3 where there are 8."""
    scales_NG: torch.Tensor
    """One for each group: of 4-bit floats a power of two, as a uint8 exponent; of 8-bit floats in a float type."""
    bits: int

    def wide(self, group: int) -> torch.Tensor:
        """The numbers (N, K) in float32, of groups of this size."""
        if self.bits == 8:
            return self.codes_NK.view(torch.float8_e4m3fn).float() * self._each(self.scales_NG.float(), group)
        numbers = torch.tensor([*E2M1, *(-value for value in E2M1)])[self.codes_NK.long()]
        return torch.ldexp(numbers, self._each(self.scales_NG.int() - BIAS, group))

    def _each(self, groups_NG: torch.Tensor, group: int) -> torch.Tensor:
        K = self.codes_NK.shape[1]
        return groups_NG if group >= K else groups_NG.repeat_interleave(group, 1)[:, :K]


@dataclass(frozen=True, kw_only=True)
class Floats:
    """A weight (N, K) of small floats, `group` of them along the input with one scale; the last may be fewer."""

    shape: tuple[int, int]
    bits: int
    group: int
    part: Callable[[int, int], SmallFloats]
    """From rows `begin` and `end`."""

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return self.part(begin, end).wide(self.group)


@dataclass(frozen=True, kw_only=True)
class FloatStack:
    """Weights of small floats, one for each expert, in a tensor (X, K, N) that has them transposed."""

    shape: tuple[int, int, int]
    bits: int
    group: int
    part: Callable[[int], SmallFloats]
    """From the number of an expert."""

    def matrix(self, expert: int, order_N: torch.Tensor | None = None) -> Floats:
        """One expert's weight (N, K), whose rows `order_N` says where they are in the file."""
        _, K, N = self.shape

        def part(begin: int, end: int) -> SmallFloats:
            found = self.part(expert)
            kept = slice(begin, end) if order_N is None else order_N[begin:end]
            return replace(found, codes_NK=found.codes_NK[kept], scales_NG=found.scales_NG[kept])

        return Floats(shape=(N, K), bits=self.bits, group=self.group, part=part)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return torch.stack([self.part(expert).wide(self.group).t() for expert in range(begin, end)])


def fill(out: torch.Tensor, weight: Weight) -> None:
    """Write a weight into a tensor of its shape, a block of rows at a time."""
    step = max(1, BLOCK // max(1, math.prod(weight.shape[1:])))
    for begin in range(0, len(out), step):
        end = min(begin + step, len(out))
        out[begin:end].copy_(weight.rows(begin, end))
