"""The objective of a step: micro-batches, their loss, and figures that are reported with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from torchwright.optimization.engines.compiled.compiler_caches import use_private_caches
from torchwright.train.model import Transformer
from torchwright.train.model.foreign import Foreign
from torchwright.train.model.vocabulary import IGNORE
from torchwright.train.parallel.stages import Staged

Batch = TypeVar("Batch", contravariant=True)
"""A micro-batch: what one process computes at once."""
LossFunction = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(ids, labels, positions or None, documents or None) → (sum of the negative log-likelihood, labels that count)."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A micro-batch of windows: the process's part of rows and of sequences."""

    ids_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor | None = None
    documents_BS: torch.Tensor | None = None
    """Begin of each token's document, for the whole rows, as `WindowBatch.documents_BT`."""
    reference_BT: torch.Tensor | None = None
    """Log-probabilities of the reference, as `WindowBatch.reference_BT`."""


class Objective(Protocol[Batch]):
    """A loss that is a mean over what counts in a step, wherever it is computed."""

    figures: tuple[str, ...]
    """Names of the figures that are reported with the loss: means over the same items."""

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of items that a micro-batch's loss is a sum over: labels or pairs."""
        ...

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses' sum over a micro-batch, and (F,) those of the figures, without gradient."""
        ...


class NextToken:
    """The negative log-likelihood of each label."""

    figures: tuple[str, ...] = ()

    def __init__(self, model: Transformer | Foreign, *, compiled: bool) -> None:
        """`compiled`: the final norm, output layer and logarithm as one."""
        self._loss = _compiled_loss(model) if compiled and isinstance(model, Transformer) else model.loss

    def count(self, batch: MicroBatch) -> torch.Tensor:
        return (batch.labels_BT != IGNORE).sum()

    def __call__(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        nll, _ = self._loss(batch.ids_BT, batch.labels_BT, batch.positions_BT, batch.documents_BS)
        return nll, nll.new_zeros(0)


def _compiled_loss(model: Transformer) -> LossFunction:
    use_private_caches()
    compiled_tail = torch.compile(model.tail, dynamic=False)
    if isinstance(model, Staged):
        model.tail = compiled_tail
        return model.loss

    def loss(
        ids_BT: torch.Tensor,
        labels_BT: torch.Tensor,
        positions_BT: torch.Tensor | None = None,
        documents_BS: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return compiled_tail(model.hidden(ids_BT, positions_BT, documents_BS), labels_BT)

    return loss
