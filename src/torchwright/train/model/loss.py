"""The training loss: labels shifted once, before any sharding, and a sum of which the step takes one global mean."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from torchwright.train.model.vocabulary import IGNORE


def shift_labels(ids_BT: torch.Tensor, valid_B: torch.Tensor | None = None) -> torch.Tensor:
    """Return labels (B, T): the token that follows each; `IGNORE` where none does.

    `valid_B` is the number of tokens in each row that are not padding, all of them by default. Shift whole sequences:
    a part of one does not hold its last token's label.
    """
    labels_BT = torch.full_like(ids_BT, IGNORE)
    labels_BT[:, :-1] = ids_BT[:, 1:]
    if valid_B is not None:
        place_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        labels_BT.masked_fill_(place_T >= valid_B[:, None] - 1, IGNORE)
    return labels_BT


def token_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed negative log-likelihood, float32 or better, and the number of labels that count.

    A step's loss is the sum over all micro-batches and processes by the number of labels over all of them; a mean of
    means would weight tokens by their company. Logits sharded over the vocabulary (tensor parallelism) stay so.
    """
    valid = (labels_BT != IGNORE).sum()
    if isinstance(logits_BTV, DTensor):
        from torchwright.train.model.vocabulary import vocabulary_parallel_nll

        return vocabulary_parallel_nll(logits_BTV, labels_BT), valid
    logits = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32)).flatten(0, -2)
    return F.cross_entropy(logits, labels_BT.flatten(), ignore_index=IGNORE, reduction="sum"), valid
