"""One tensor of a model's files, and how it holds our parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torchwright.models.decoder.config import ExpertsConfig
from torchwright.models.decoder.family import Names


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


@dataclass(frozen=True, kw_only=True, eq=False)
class FileTensor:
    """Whole parameters one below the other or of all experts, or one expert of a parameter."""

    name: str
    parameters: tuple[str, ...]
    expert: int | None = None
    stack: Stack | None = None
    """Given for a tensor of all experts."""
    bias: bool = False
    """True if the bias chooses experts."""
    order_N: torch.Tensor | None = None
    """Which of the file's rows each row of the parameters is; None where all are the same."""
    taps: bool = False
    """True if it holds taps (C, 1, W), which are (C, W) here."""

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape in the file, given those of the parameters."""
        first = shapes[0]
        if self.expert is not None:
            return first[1:]
        if self.stack is not None:
            return self.stack.shape(shapes)
        total = sum(shape[0] for shape in shapes)
        return (total, 1, *first[1:]) if self.taps else (total, *first[1:])

    def parts(self, full: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[torch.Tensor]:
        """Return the parameters' values, given the file's."""
        if self.stack is not None:
            return self.stack.parts(full, len(shapes))
        full = full[:, 0] if self.taps else full
        full = full if self.order_N is None else full[self.order_N]
        return full.split([shape[0] for shape in shapes])

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the file's value, given the parameters'."""
        if self.stack is not None:
            return self.stack.join(parts)
        full = self.as_in_file(torch.cat(list(parts)))
        return full[:, None] if self.taps else full

    def as_in_file(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of the parameters in the file's order."""
        if self.order_N is None:
            return rows
        ordered = torch.empty_like(rows)
        ordered[self.order_N] = rows
        return ordered


def expert_stacks(experts: ExpertsConfig, names: Names, file: str, ours: str) -> Iterator[FileTensor]:
    """Yield a layer's tensors of all experts; `file` and `ours` are what precedes the names there and here.

    gpt-oss, whose experts have biases, keeps matrices transposed, and gate and up in turns.
    """
    odd, kind = experts.linear_bias, ".weight" if names.stacked_modules else ""
    both, down = names.stacked_experts
    for name, parts, turns in ((both, ("gate", "up"), odd), (down, ("down",), False)):
        parameters = tuple(f"{ours}{part}" for part in parts)
        stack = Stack(turns=turns, transposed=odd)
        yield FileTensor(name=f"{file}{name}{kind}", parameters=parameters, stack=stack)
        if odd:
            biases = tuple(f"{parameter}_bias" for parameter in parameters)
            stack = Stack(turns=turns, transposed=False)
            yield FileTensor(name=f"{file}{name}_bias", parameters=biases, stack=stack)
