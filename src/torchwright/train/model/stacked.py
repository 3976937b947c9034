"""Tensors of files that hold a matrix, or a bias, of every expert, where the trainer has parameters (X, N, K)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One parameter, or gate and up in one tensor: one below the other, or row by row in turns."""

    turns: bool
    transposed: bool
    """True if the file has matrices as (X, K, N)."""

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the file's shape for parameters of these shapes."""
        experts, _, *columns = shapes[0]
        rows = sum(shape[1] for shape in shapes)
        return (experts, *columns, rows) if self.transposed else (experts, rows, *columns)

    def join(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the file's tensor."""
        whole = torch.stack(list(values), 2).flatten(1, 2) if self.turns else torch.cat(list(values), 1)
        return whole.transpose(1, -1) if self.transposed else whole

    def parts(self, whole: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return the `count` parameters that the file's tensor holds."""
        if self.transposed:
            whole = whole.transpose(1, -1)
        if not self.turns:
            return list(whole.chunk(count, 1))
        return list(whole.unflatten(1, (-1, count)).unbind(2))
