"""Training on pairs of answers: DPO (Rafailov et al., 2023) and its kin, one function a loss.

A row of a batch holds whole pairs: the prompt with the chosen answer, then the prompt with the rejected answer. Each
is a document of its own. The log-probabilities of each answer's tokens are added up. A loss is a function of these
sums, the sums of the reference (the model that the run starts from), and the answers' lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from torchwright.train.model import Transformer
from torchwright.train.model.vocabulary import IGNORE
from torchwright.train.run.config.objective_section import MARGIN, LossName, Preference
from torchwright.train.run.objectives.objective import MicroBatch


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Pairs of answers, the chosen one first; float32 or better."""

    logp_P2: torch.Tensor
    """Log-probability of all of an answer's tokens."""
    tokens_P2: torch.Tensor
    """Number of tokens of each answer."""
    reference_P2: torch.Tensor
    """`logp_P2` of the reference; zero where a loss needs none."""

    @property
    def ratio_P2(self) -> torch.Tensor:
        """Return how much likelier an answer has become, as a logarithm."""
        return self.logp_P2 - self.reference_P2

    @property
    def mean_P2(self) -> torch.Tensor:
        """Log-probability per token."""
        return self.logp_P2 / self.tokens_P2


def dpo(answers: Answers, how: Preference) -> torch.Tensor:
    """−log σ(β Δ) of the ratios' difference Δ; with `label_smoothing` ε (Mitchell, 2023) the other way round with ε."""
    margin_P, noise = how.strength * difference(answers.ratio_P2), how.label_smoothing or 0.0
    return -(1 - noise) * F.logsigmoid(margin_P) - noise * F.logsigmoid(-margin_P)


def ipo(answers: Answers, how: Preference) -> torch.Tensor:
    """(Δ − 1 / 2β)², of ratios per token (Azar et al., 2024)."""
    return (difference(answers.ratio_P2 / answers.tokens_P2) - 1 / (2 * how.strength)).square()


def hinge(answers: Answers, how: Preference) -> torch.Tensor:
    """max(0, 1 − β Δ) (SLiC, Zhao et al., 2023; with a reference, Liu et al., 2024)."""
    return (1 - how.strength * difference(answers.ratio_P2)).relu()


def orpo(answers: Answers, how: Preference) -> torch.Tensor:
    """The chosen answer's loss per token, and β times −log σ of the difference of log odds (Hong et al., 2024)."""
    mean_P2 = answers.mean_P2
    odds_P2 = mean_P2 - torch.log1p(-mean_P2.exp())
    return -mean_P2[:, 0] - how.strength * F.logsigmoid(difference(odds_P2))


def simpo(answers: Answers, how: Preference) -> torch.Tensor:
    """−log σ(β Δ − margin), of log-probabilities per token (Meng et al., 2024)."""
    margin = MARGIN if how.margin is None else how.margin
    return -F.logsigmoid(how.strength * difference(answers.mean_P2) - margin)


def difference(values_P2: torch.Tensor) -> torch.Tensor:
    """Chosen less rejected."""
    return values_P2[:, 0] - values_P2[:, 1]


LOSSES: Mapping[LossName, Callable[[Answers, Preference], torch.Tensor]] = {
    "dpo": dpo,
    "ipo": ipo,
    "hinge": hinge,
    "orpo": orpo,
    "simpo": simpo,
}


class Preferences:
    """One of `LOSSES`, a mean over pairs."""

    figures: tuple[str, ...] = (
        "reward_margin",
        "reward_accuracy",
        "reward_chosen",
        "reward_rejected",
        "logp_chosen",
        "logp_rejected",
    )
    """A reward is β times what an answer has become likelier, of losses without a reference β times its log-probability
    per token; the accuracy is the share of pairs whose chosen answer has the larger one."""

    def __init__(self, model: Transformer, how: Preference) -> None:
        self._model, self._how, self._loss = model, how, LOSSES[how.loss]

    def count(self, batch: MicroBatch) -> torch.Tensor:
        """Pairs."""
        return torch.tensor(len(labels_by_document(batch)) // 2, device=batch.ids_BT.device)

    def answers(self, batch: MicroBatch) -> Answers:
        """The pairs of a batch as the model sees them, row by row."""
        tokens_D, labelled_BT = labels_by_document(batch), batch.labels_BT != IGNORE
        hidden_BTE = self._model.hidden(batch.ids_BT, batch.positions_BT, batch.documents_BS)
        # Of a prompt no logits are wanted.
        logits_NV = self._model.logits(hidden_BTE[labelled_BT])
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        logp_N = -F.cross_entropy(logits_NV, batch.labels_BT[labelled_BT], reduction="none")
        # `unsafe` leaves out a check that fails where there is nothing to add up.
        logp_D = torch.segment_reduce(logp_N, "sum", lengths=tokens_D, axis=0, unsafe=True)
        reference_D = torch.zeros_like(logp_D)
        if batch.reference_BT is not None:
            reference_D = batch.reference_BT[labelled_BT][tokens_D.cumsum(0) - tokens_D].to(logp_D)
        return Answers(
            logp_P2=logp_D.unflatten(0, (-1, 2)),
            tokens_P2=tokens_D.unflatten(0, (-1, 2)),
            reference_P2=reference_D.unflatten(0, (-1, 2)),
        )

    def __call__(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        answers = self.answers(batch)
        loss = self._loss(answers, self._how).sum()
        with torch.no_grad():
            likelier_P2 = answers.ratio_P2 if self._how.needs_reference else answers.mean_P2
            reward_P2 = self._how.strength * likelier_P2
            margin_P = difference(reward_P2)
            told = [margin_P, (margin_P > 0).to(margin_P.dtype), *reward_P2.T, *answers.logp_P2.T]
            return loss, torch.stack([each_P.sum() for each_P in told])


def labels_by_document(batch: MicroBatch) -> torch.Tensor:
    """(D,): how many labels each document has, row by row; of those that have any."""
    assert batch.documents_BS is not None
    B, T = batch.ids_BT.shape
    first_B1 = torch.arange(B, device=batch.ids_BT.device)[:, None] * T
    document_N = (batch.documents_BS + first_B1)[batch.labels_BT != IGNORE]
    return torch.unique_consecutive(document_N, return_counts=True)[1]
