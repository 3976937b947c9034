"""The loss of a head: how far its steps' distributions are from the target's, and how much of them is accepted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from torchwright.train.draft.head import EagleHead
from torchwright.train.draft.mtp_head import MtpHead
from torchwright.train.draft.target import HiddenStates, TargetModel
from torchwright.train.run.objectives.objective import MicroBatch

COLUMNS = ("count", "loss", "agree", "overlap", "chain")
"""Sums of a step: places that count; cross entropies; places where the likeliest tokens are equal; the probability that
sampled proposals are accepted, sum of min(p, q); chains that are right up to here."""


@dataclass(frozen=True, kw_only=True)
class DraftBatch:
    """A micro-batch of windows with the target's hidden states."""

    windows: MicroBatch
    states: HiddenStates


class DraftModel(nn.Module):
    """The head as a run trains it: in one call all steps and their sums, so that FSDP gathers it once."""

    def __init__(self, head: EagleHead | MtpHead, target: TargetModel, steps: int, decay: float) -> None:
        super().__init__()
        self.head, self._steps = head, steps
        self._target = (target,)  # in a tuple: its parts are not this module's
        weights = [decay**step for step in range(steps)]
        self._weights = [weight / sum(weights) for weight in weights]

    def loss(self, batch: DraftBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted sum of the steps' losses, and `COLUMNS` (S, 5) of each step in float32, without gradient.

        Soft labels are the target's probabilities as they are, not scaled up to 1 over the tokens that the head knows:
        a place counts as much as there is to gain in it.
        """
        windows, head = batch.windows, self.head
        ids_BT, documents_BT = windows.ids_BT, windows.documents_BS
        B, T = ids_BT.shape
        positions_BT = windows.positions_BT
        if positions_BT is None:
            positions_BT = torch.arange(T, device=ids_BT.device)[None]
        trained_BT = windows.labels_BT >= 0
        chances_ND, best_N = self._wanted(batch.states, trained_BT)
        place_BT = trained_BT.flatten().cumsum(0).sub(1).unflatten(0, (B, T))
        chain_BT = torch.ones_like(trained_BT)
        total = chances_ND.new_zeros(())
        sums = list[torch.Tensor]()
        hidden = head.chains(ids_BT, batch.states.observed_BTF, positions_BT, documents_BT, self._steps)
        for step, hidden_BTE in enumerate(hidden):
            counts_BT = _counted(trained_BT, documents_BT, 1 + step)
            row_N = place_BT.roll(-1 - step, 1)[counts_BT]
            logits_ND = head.answer(hidden_BTE[counts_BT]).float()
            log_ND, wanted_ND = logits_ND.log_softmax(-1), chances_ND[row_N]
            loss = -(wanted_ND * log_ND).sum()
            total = total + self._weights[step] * loss
            with torch.no_grad():
                agree_N = head.ids[logits_ND.argmax(-1)] == best_N[row_N]
                agree_BT = torch.zeros_like(chain_BT)
                agree_BT[counts_BT] = agree_N
                chain_BT = chain_BT & agree_BT
                overlap = torch.minimum(wanted_ND, log_ND.exp()).sum()
                figures = [counts_BT.sum(), loss.detach(), agree_N.sum(), overlap, chain_BT.sum()]
                sums.append(torch.stack([figure.float() for figure in figures]))
        return total, torch.stack(sums)

    def weighted(self, losses_S: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the steps' losses."""
        return losses_S @ losses_S.new_tensor(self._weights)

    def _wanted(self, states: HiddenStates, trained_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chances_ND, best_N = self._target[0].probabilities(states.final_BTE[trained_BT], self.head.ids)
        return chances_ND, best_N


def _counted(trained_BT: torch.Tensor, documents_BT: torch.Tensor | None, ahead: int) -> torch.Tensor:
    """Slots (B, T) whose proposal stands for a token that is trained on, of the same document.

    A slot's proposal is compared with the target's distribution `ahead` places behind it.
    """
    T = trained_BT.shape[1]
    counts_BT = trained_BT.roll(-ahead, 1)
    counts_BT[:, max(0, T - ahead) :] = False
    if documents_BT is not None:
        counts_BT &= documents_BT.roll(-ahead, 1) == documents_BT
    return counts_BT


class DraftLoss:
    """The objective of a step: nats a place, the steps weighted."""

    figures: tuple[str, ...] = ("accuracy", "accepted_tokens")

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    def count(self, batch: DraftBatch) -> torch.Tensor:
        """Places that count at the first step."""
        windows = batch.windows
        return _counted(windows.labels_BT >= 0, windows.documents_BS, 1).sum()

    def __call__(self, batch: DraftBatch) -> tuple[torch.Tensor, torch.Tensor]:
        total, sums = self._model.loss(batch)
        # Of the first step's proposals, and of whole chains.
        return total, torch.stack([sums[0, 2], sums[:, 4].sum()])
