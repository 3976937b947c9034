"""One tensor of a model's files, and how it holds our parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class FileTensor:
    """Whole parameters one below the other, or one expert of a parameter."""

    name: str
    parameters: tuple[str, ...]
    expert: int | None = None
    bias: bool = False
    """True if the bias chooses experts."""
    dim: int = 0
    """The dimension along which the parameters lie; 1 for matrices of all experts in one tensor."""
    order_N: torch.Tensor | None = None
    """Which of the file's rows each row of the parameters is; None where all are the same."""
    taps: bool = False
    """True if it holds taps (C, 1, W), which are (C, W) here."""

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape in the file, given those of the parameters."""
        first = shapes[0]
        if self.expert is not None:
            return first[1:]
        total = sum(shape[self.dim] for shape in shapes)
        if self.taps:
            return (total, 1, *first[1:])
        return (*first[: self.dim], total, *first[self.dim + 1 :])

    def parts(self, full: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[torch.Tensor]:
        """Return the parameters' values, given the file's."""
        full = full[:, 0] if self.taps else full
        full = full if self.order_N is None else full[self.order_N]
        return full.split([shape[self.dim] for shape in shapes], self.dim)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the file's value, given the parameters'."""
        full = self.as_in_file(torch.cat(list(parts), self.dim))
        return full[:, None] if self.taps else full

    def as_in_file(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of the parameters in the file's order."""
        if self.order_N is None:
            return rows
        ordered = torch.empty_like(rows)
        ordered[self.order_N] = rows
        return ordered
