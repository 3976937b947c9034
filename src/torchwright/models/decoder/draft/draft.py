"""The interface of a draft model for the serving engine."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.cache import LayerCache
from torchwright.models.decoder.paged_model import PagedModel
from torchwright.models.decoder.pages import PageShape
from torchwright.models.decoder.program import Program


class Likeliest(NamedTuple):
    """The likeliest next tokens of each of N rows, falling."""

    tokens_NK: np.ndarray
    logprob_NK: np.ndarray
    """Float32, minus infinity where the draft's logits are not numbers."""


class Draft(nn.Module):
    """A model that proposes the tokens which follow a text, over the pages of the decoder that verifies them.

    Its keys and values lie in layers of their own in the same pages: they are shared, kept and given back along with
    the decoder's. They decide how many proposals are accepted, and never which tokens a request gets.
    """

    kind: str
    """Name of the method, for people."""
    lag: int
    """Token t is computed in slot t - `lag`."""
    width: int
    """Numbers of a hidden state."""
    observed: tuple[int, ...] = ()
    """Layers of the decoder whose inputs it reads (`FeatureRows`)."""
    page_shapes: tuple[PageShape, ...]
    """Keys and values of a token, by layer."""

    def forward(self, batch: Batch, states_TX: torch.Tensor | None, pages: LayerCache) -> torch.Tensor:
        """Hidden states (T, E) of the batch's tokens; writes their keys and values.

        `states_TX` are the decoder's features of the tokens before them or, behind these, the draft's own hidden
        states; None for a draft that reads neither.
        """
        raise NotImplementedError

    def likeliest(self, hidden_NE: torch.Tensor, count: int) -> Likeliest:
        """Return the `count` likeliest next tokens of each row."""
        raise NotImplementedError

    @property
    def unplanned(self) -> str | None:
        """The reason for which its calls are not one operator each (`plan.py`), or None."""
        return "there is no plan of such a draft"

    def program(self, pages: LayerCache, *, observes: bool) -> Program:
        """Describe `forward` and the logits of `likeliest` to the kernels.

        It reads the decoder's features if it `observes`, or its own hidden states.
        """
        raise NotImplementedError

    def angles(self, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of its program, for at least `longest` positions."""
        raise NotImplementedError

    def read_from(self, decoder: PagedModel) -> None:
        """Take a new decoder's embedding and output layer, where the draft uses the decoder's; its layers stay."""


def likeliest(logits_NV: torch.Tensor, count: int, ids: np.ndarray | None = None) -> Likeliest:
    """Take the `count` likeliest of float32 logits; `ids` are the tokens that they stand for, if not their places."""
    count = min(count, logits_NV.shape[1])
    best = logits_NV.max(-1, keepdim=True) if count == 1 else logits_NV.topk(count, -1)
    logprob_NK = (best.values - logits_NV.logsumexp(-1, keepdim=True)).nan_to_num(-math.inf, neginf=-math.inf)
    places_NK = best.indices.cpu().numpy()
    return Likeliest(places_NK if ids is None else ids[places_NK], logprob_NK.cpu().numpy())
