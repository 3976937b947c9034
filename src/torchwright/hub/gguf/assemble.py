"""Weights assembled from those of a file: rows of several below each other, rows or columns in another order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from torchwright.hub.weight import Grouped, Integers, Plain, Weight, Wide


def below(parts: Sequence[Weight], kinds: Sequence[str]) -> Weight:
    """Return the parts one below the other; integers stay integers if all are of the same type of blocks."""
    sizes = [part.shape[0] for part in parts]
    shape = (sum(sizes), *parts[0].shape[1:])
    grouped = [part for part in parts if isinstance(part, Grouped)]
    if len(grouped) < len(parts) or len(set(kinds)) > 1:
        return Wide(
            shape, lambda begin, end: torch.cat([parts[n].rows(*at) for n, at in _cut(sizes, begin, end)])
        )
    return replace(
        grouped[0],
        shape=shape,
        part=lambda begin, end: _cat([grouped[n].part(*at) for n, at in _cut(sizes, begin, end)]),
    )


def rows(weight: Weight, order_N: torch.Tensor) -> Weight:
    """Return a weight whose row n is row `order_N[n]` of the given one, dequantized as it is asked for."""

    def make(begin: int, end: int) -> torch.Tensor:
        return torch.cat([weight.rows(*run) for run in _runs(order_N[begin:end].tolist())])

    return Wide(weight.shape, make)


def columns(weight: Weight, order_K: torch.Tensor) -> Weight:
    """Return a weight whose column k is column `order_K[k]`; integers stay integers if groups move as a whole."""
    if isinstance(weight, Plain):
        return Plain(weight.tensor[:, order_K])
    if isinstance(weight, Grouped) and len(order_K) % weight.group == 0:
        groups = order_K.view(-1, weight.group)
        first = groups[:, :1]
        if torch.equal(groups, first + torch.arange(weight.group)) and not bool((first % weight.group).any()):
            order_G = (first // weight.group).flatten()
            return replace(weight, part=lambda begin, end: _moved(weight.part(begin, end), order_K, order_G))
    return Wide(weight.shape, lambda begin, end: weight.rows(begin, end)[:, order_K])


def _cut(sizes: Sequence[int], begin: int, end: int) -> list[tuple[int, tuple[int, int]]]:
    """Return the parts that rows `begin` to `end` lie in, and which rows of each."""
    found, start = [], 0
    for part, size in enumerate(sizes):
        first, last = max(begin - start, 0), min(end - start, size)
        if first < last:
            found.append((part, (first, last)))
        start += size
    return found or [(0, (0, 0))]


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return begin and end of each run of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found or [(0, 0)]


def _cat(parts: Sequence[Integers]) -> Integers:
    least = [part.least_NG for part in parts if part.least_NG is not None]
    return Integers(
        integers_NK=torch.cat([part.integers_NK for part in parts]),
        scales_NG=torch.cat([part.scales_NG for part in parts]),
        least_NG=torch.cat(least) if least else None,
    )


def _moved(part: Integers, order_K: torch.Tensor, order_G: torch.Tensor) -> Integers:
    return Integers(
        integers_NK=part.integers_NK[:, order_K],
        scales_NG=part.scales_NG[:, order_G],
        least_NG=None if part.least_NG is None else part.least_NG[:, order_G],
    )
