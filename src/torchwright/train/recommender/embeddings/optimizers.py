"""Optimizers that update only the rows of a table whose gradient has just been computed.

The gradient of a step exists only for the rows that were looked up, each once, never as a dense tensor. Gradients and
state are float32 or better whatever the weights are: in bfloat16 a count stops at 256, and a sum soon after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

State = dict[str, torch.Tensor]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values are summed over steps for weights of `dtype`: float32 or better."""
    return torch.promote_types(dtype, torch.float32)


def _move(weight_RC: torch.Tensor, rows_U: torch.Tensor, step_UC: torch.Tensor) -> None:
    """Take `step_UC` from the rows, rounding to the weights' type once."""
    weight_RC[rows_U] = (weight_RC[rows_U] - step_UC).to(weight_RC.dtype)


class RowOptimizer(Protocol):
    """The optimizer interface of `ShardedEmbeddings`; `lr` may change between steps."""

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
        _move(weight_RC, rows_U, self.lr * grad_UC)


@dataclass
class RowWiseAdagrad:
    """Adagrad with one sum of squares a row: the mean of the row's squared gradients (as FBGEMM and TorchRec have it).

    Of a table cut by columns each part has a sum of its own.
    """

    lr: float
    eps: float = 1e-8

    def new_state(self, weight_RC: torch.Tensor) -> State:
        return {"squares": weight_RC.new_zeros(len(weight_RC), dtype=wide(weight_RC.dtype))}

    def update(
        self, weight_RC: torch.Tensor, state: State, rows_U: torch.Tensor, grad_UC: torch.Tensor
    ) -> None:
        squares_U = state["squares"][rows_U] + grad_UC.square().mean(1)
        state["squares"][rows_U] = squares_U
        _move(weight_RC, rows_U, self.lr * grad_UC / (squares_U.sqrt() + self.eps)[:, None])


@dataclass
class Adam:
    """Adam (Kingma and Ba, 2015) on the rows that a step looks up; the moments of all others stay (torch's
    SparseAdam).
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def new_state(self, weight_RC: torch.Tensor) -> State:
        zeros = torch.zeros_like(weight_RC, dtype=wide(weight_RC.dtype))
        return {"mean": zeros, "square": zeros.clone(), "steps": zeros.new_zeros(())}

    def update(
        self, weight_RC: torch.Tensor, state: State, rows_U: torch.Tensor, grad_UC: torch.Tensor
    ) -> None:
        state["steps"] += 1
        steps, (first, second) = float(state["steps"]), self.betas
        mean_UC = state["mean"][rows_U].lerp(grad_UC, 1 - first)
        square_UC = state["square"][rows_U].lerp(grad_UC.square(), 1 - second)
        state["mean"][rows_U], state["square"][rows_U] = mean_UC, square_UC
        step_UC = mean_UC / (1 - first**steps) / ((square_UC / (1 - second**steps)).sqrt() + self.eps)
        _move(weight_RC, rows_U, self.lr * step_UC)
