"""Optimizers that update the rows of a table whose gradient has just been computed, and no others.

The gradient of a step exists for the rows that were looked up, each once; there is no dense gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

State = dict[str, torch.Tensor]


class RowOptimizer(Protocol):
    """What `ShardedEmbeddings` asks of an optimizer; `lr` may change between steps."""

    lr: float

    def new_state(self, weight_RC: torch.Tensor) -> State: ...
    def update(
        self, weight_RC: torch.Tensor, state: State, rows_U: torch.Tensor, grad_UC: torch.Tensor
    ) -> None: ...


@dataclass
class SGD:
    """w ← w − lr · g."""

    lr: float

    def new_state(self, weight_RC: torch.Tensor) -> State:
        return {}

    def update(
        self, weight_RC: torch.Tensor, state: State, rows_U: torch.Tensor, grad_UC: torch.Tensor
    ) -> None:
        weight_RC.index_add_(0, rows_U, grad_UC, alpha=-self.lr)


@dataclass
class RowWiseAdagrad:
    """Adagrad with one sum of squares a row: the mean of the row's squared gradients (as FBGEMM and TorchRec have it).

    Of a table cut by columns each part has a sum of its own.
    """

    lr: float
    eps: float = 1e-8

    def new_state(self, weight_RC: torch.Tensor) -> State:
        return {"squares": weight_RC.new_zeros(len(weight_RC))}

    def update(
        self, weight_RC: torch.Tensor, state: State, rows_U: torch.Tensor, grad_UC: torch.Tensor
    ) -> None:
        squares_U = state["squares"][rows_U] + grad_UC.square().mean(1)
        state["squares"][rows_U] = squares_U
        weight_RC.index_add_(0, rows_U, grad_UC / (squares_U.sqrt() + self.eps)[:, None], alpha=-self.lr)


@dataclass
class Adam:
    """Adam (Kingma and Ba, 2015) on the rows that a step looks up; the moments of others stay (torch's SparseAdam)."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def new_state(self, weight_RC: torch.Tensor) -> State:
        zeros = torch.zeros_like(weight_RC)
        return {"mean": zeros, "square": zeros.clone(), "steps": weight_RC.new_zeros(())}

    def update(
        self, weight_RC: torch.Tensor, state: State, rows_U: torch.Tensor, grad_UC: torch.Tensor
    ) -> None:
        state["steps"] += 1
        steps, (first, second) = float(state["steps"]), self.betas
        mean_UC = state["mean"][rows_U].lerp(grad_UC, 1 - first)
        square_UC = state["square"][rows_U].lerp(grad_UC.square(), 1 - second)
        state["mean"][rows_U], state["square"][rows_U] = mean_UC, square_UC
        step_UC = mean_UC / (1 - first**steps) / ((square_UC / (1 - second**steps)).sqrt() + self.eps)
        weight_RC.index_add_(0, rows_U, step_UC, alpha=-self.lr)
