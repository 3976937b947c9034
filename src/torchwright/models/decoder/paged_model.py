"""The interface of a model that keeps keys and values in pages, for `generate` and the serving engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.cache import PagedCache
from torchwright.models.decoder.scores import Logits


class PagedModel(nn.Module):
    """A causal language model over ragged batches and a paged cache: the native decoder, or one of transformers."""

    config: Any
    """A `PagedConfig`, of which a subclass may say more."""
    embedding: torch.Tensor
    """The embedding table, whose device and dtype are the model's."""

    @property
    def on_kernels(self) -> bool:
        """Check whether compiled kernels do all that takes long."""
        raise NotImplementedError

    def forward(self, batch: Batch, cache: PagedCache) -> torch.Tensor:
        """States (T, …) of all tokens, for `logits`; writes the tokens' keys and values into the cache."""
        raise NotImplementedError

    def answer(self, batch: Batch, cache: PagedCache, rows_N: torch.Tensor) -> Logits:
        """Logits of these rows (int64) of the batch; writes all tokens' keys and values into the cache."""
        raise NotImplementedError

    def logits(self, states_NE: torch.Tensor) -> torch.Tensor:
        """Logits (N, V) in float32 of rows of what `forward` returned."""
        raise NotImplementedError
