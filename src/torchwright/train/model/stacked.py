"""Tensors of files that hold a matrix, or a bias, of every expert, where the trainer has parameters (X, N, K)."""

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


def expert_stacks(experts: ExpertsConfig, names: Names) -> Iterator[tuple[str, tuple[str, ...], Stack]]:
    """Yield a layer's tensors of all experts: name, parameters of `Experts`, and how the one holds the others.

    gpt-oss, whose experts have biases, keeps matrices transposed, and gate and up in turns.
    """
    odd = experts.linear_bias
    (both,) = names.expert_gate_up
    # Granite has modules with weights, the others parameters.
    kind = "" if names.expert_down.endswith("_proj") else ".weight"
    for name, parts, turns in ((both, ("gate", "up"), odd), (names.expert_down, ("down",), False)):
        yield f"{name}{kind}", parts, Stack(turns=turns, transposed=odd)
        if experts.linear_bias:
            yield (
                f"{name}_bias",
                tuple(f"{part}_bias" for part in parts),
                Stack(turns=turns, transposed=False),
            )
