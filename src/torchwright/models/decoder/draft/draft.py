"""The interface of a draft model for the serving engine."""

from __future__ import annotations

import torch
from torch import nn

from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.cache import LayerCache
from torchwright.models.decoder.paged_model import PagedModel
from torchwright.models.decoder.pages import PageShape


class Draft(nn.Module):
    """A model that proposes the tokens which follow a text, over the pages of the decoder that verifies them.

    Its keys and values lie in layers of their own in the same pages: they are shared, kept and given back along with
    the decoder's. They decide how many proposals are accepted, and never which tokens a request gets.
    """

    kind: str
    """Name of the method, for people."""
    lag: int
    """Token t is computed in slot t - `lag`."""
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

    def best(self, hidden_NE: torch.Tensor) -> tuple[list[int], list[float]]:
        """The most likely next token of each row, and its probability."""
        raise NotImplementedError

    def read_from(self, decoder: PagedModel) -> None:
        """Take a new decoder's embedding and output layer, where the draft uses the decoder's; its layers stay."""
