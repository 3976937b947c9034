"""Balancing of experts on one process, written out: the loss of Switch Transformer, and the bias after each step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.models.decoder.shared import route
from torchwright.train.model import Transformer
from torchwright.train.model.blocks import MixtureOfExperts
from torchwright.train.run.config.run import Run


class PlainBalancing:
    """A step's router outputs, and their effect under `[experts]`."""

    def __init__(self, model: Transformer, run: Run) -> None:
        self.run, self.score_NX = run, dict[str, torch.Tensor]()
        self.mixtures = {
            name: module for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)
        }
        for name, module in self.mixtures.items():
            module.router.register_forward_hook(partial(self._keep, name))

    def _keep(self, name: str, _router: nn.Module, _inputs: Any, score_NX: torch.Tensor) -> None:
        self.score_NX[name] = score_NX.to(torch.promote_types(score_NX.dtype, torch.float32))

    def _shares(self, name: str) -> torch.Tensor:
        """(N, X): a token's shares, which sum to 1."""
        score_NX = self.score_NX[name]
        if not self.mixtures[name].config.sigmoid:
            return score_NX.softmax(-1)
        share_NX = score_NX.sigmoid()
        return share_NX / share_NX.sum(-1, keepdim=True)

    def _choices(self, name: str) -> torch.Tensor:
        """(N, X): 1 where a token goes to an expert."""
        mixture = self.mixtures[name]
        _, expert_NC, _ = route(self.score_NX[name], mixture.bias, mixture.config)
        return F.one_hot(expert_NC, mixture.count).sum(1)

    def loss(self) -> torch.Tensor:
        """Return the term that is added to the step's loss for the gradient alone, nothing if a bias does the
        balancing.
        """
        total, experts = torch.zeros(()), self.run.experts
        if experts is None or not isinstance(experts.balance, float):
            return total
        for name in self.score_NX:
            choice_MNX, share_MNX = (
                self._by_micro_batch(all_NX) for all_NX in (self._choices(name), self._shares(name))
            )
            fraction_MX = choice_MNX.sum(1) / choice_MNX.sum((1, 2))[:, None]
            even_M = fraction_MX.shape[1] * (fraction_MX * share_MNX.mean(1)).sum(1)
            total = total + experts.balance * even_M.mean()
        return total

    def _by_micro_batch(self, all_NX: torch.Tensor) -> torch.Tensor:
        """Each process cuts its own rows, and the same pieces of all are one micro-batch: (M, N / M, X)."""
        ways, micro = self.run.parallel.batch_ways, self.run.micro_batches
        return all_NX.unflatten(0, (ways, micro, -1)).movedim(1, 0).flatten(1, 2)

    def loads(self) -> dict[str, torch.Tensor]:
        """Mixture → (X,): how many choices fell on each expert."""
        return {name: self._choices(name).sum(0) for name in self.mixtures}

    def move(self) -> None:
        """Take from the biases of experts that were fuller than the mean, add to those that were not."""
        experts = self.run.experts
        if experts is None or experts.balance != "bias":
            return
        assert experts.bias_rate is not None
        for name, load_X in self.loads().items():
            bias = self.mixtures[name].bias
            assert bias is not None
            bias += experts.bias_rate * (load_X.double().mean() - load_X).sign().to(bias.dtype)
