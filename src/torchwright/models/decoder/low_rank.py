"""Low-rank adapters next to the weights: an output row gets B A x added, by the adapter of its own sequence.

A row depends bitwise on its own input and adapter alone: the compiled kernels sum each row in one order, whatever else
is in the batch. Rows without an adapter are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from torchwright.hardware.kernels import reference

PARTS = ("qkv", "o", "gate_up", "down")
"""The linear layers of a decoder layer that an adapter may change, in the order of a plan."""


class Pair(NamedTuple):
    """The two matrices of one linear layer; the factor is in B, and fused layers have their A's one below the other."""

    a_RK: torch.Tensor
    b_NR: torch.Tensor


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter of a decoder, ready to be computed with."""

    digest: str
    """SHA-256 of all that it computes with. Equal adapters have equal keys and values, whatever they are called."""
    bytes: int
    pairs: Mapping[int, Pair]
    """Place (`place_of`) → matrices, for PyTorch; empty where `native` holds them."""
    native: Any = None
    """The compiled kernels' own holder of the matrices."""


def place_of(layer: int, part: str) -> int:
    """Return the number of a linear layer, one of `PARTS` of a decoder layer."""
    return layer * len(PARTS) + PARTS.index(part)


class AdaptedRows:
    """The rows of a batch that adapters change."""

    def __init__(self, groups: Mapping[Adapter, torch.Tensor]) -> None:
        """`groups` has the rows of each adapter, int64; a row has at most one."""
        self._groups = groups

    @classmethod
    def of(cls, pieces: Iterable[tuple[Adapter | None, int]], device: torch.device) -> AdaptedRows:
        """Return those of a batch of pieces, each a sequence's adapter and how many rows it has."""
        groups: dict[Adapter, list[int]] = {}
        row = 0
        for adapter, count in pieces:
            if adapter is not None:
                groups.setdefault(adapter, []).extend(range(row, row + count))
            row += count
        return cls({adapter: torch.tensor(rows, device=device) for adapter, rows in groups.items()})

    @cached_property
    def native(self) -> Any:
        """The rows as the compiled kernels take them, None where an adapter is in plain PyTorch."""
        if not all(adapter.native is not None for adapter in self._groups):
            return None
        made: Any = torch.classes.torchwright.AdaptedRows
        return made([adapter.native for adapter in self._groups], [*self._groups.values()])

    def add(self, y_TN: torch.Tensor, x_TK: torch.Tensor, place: int) -> None:
        """Add what adapters have at a place to the output `y_TN` of its linear layer."""
        if self.native is not None:
            self.native.add(place, y_TN, x_TK.contiguous())
            return
        for adapter, rows in self._groups.items():
            if (pair := adapter.pairs.get(place)) is not None:
                reference.add_low_rank(y_TN, x_TK, rows, *pair)


class LayerAdapters(NamedTuple):
    """The adapted rows of a batch, for one decoder layer."""

    rows: AdaptedRows
    layer: int


def project(linear: nn.Module, x_TK: torch.Tensor, part: str, adapters: LayerAdapters | None) -> torch.Tensor:
    """Return a linear layer's output, with what adapters add to it; `part` is one of `PARTS`."""
    y_TN = linear(x_TK)
    if adapters is not None:
        adapters.rows.add(y_TN, x_TK, place_of(adapters.layer, part))
    return y_TN
