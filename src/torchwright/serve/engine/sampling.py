"""Choose tokens from logits: one sequence's options in their order, and the probabilities that it reports.

The order is: the grammar's mask and `min_tokens`, `logit_bias`, penalties, temperature, top-k, top-p, min-p, the
draw. Every row is computed by itself, so that nothing depends on the rest of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch

from torchwright.models.decoder.generation.sampling import Sampler, Sampling
from torchwright.serve.wire.messages import SamplingOptions, Submit, TokenLogprob


class Chooser:
    """The sampler of one sequence; it knows the accepted tokens."""

    def __init__(self, submit: Submit, index: int, *, prompt: Sequence[int] | None = None) -> None:
        """`prompt`: the tokens that penalties count in addition to the answer's, if they differ from the request's."""
        options = submit.sampling
        before = submit.ids if prompt is None else prompt
        self._sampler = Sampler(sampling_of(options), before, options.seed, index)
        self._bias = torch.tensor(list(options.logit_bias.values()), dtype=torch.float32)
        self._biased = torch.tensor(list(options.logit_bias), dtype=torch.long)
        self._stops = torch.tensor(submit.stop_ids, dtype=torch.long)
        self._min_tokens, self._accepted = submit.min_tokens, 0

    @property
    def is_argmax(self) -> bool:
        """True if the next token is the first largest of the plain logits, where no grammar masks any."""
        return self._sampler.is_argmax and not len(self._biased) and not self._withholds

    def choose(
        self, logits_V: torch.Tensor, peaks_P: torch.Tensor | None, allowed_V: torch.Tensor | None
    ) -> int:
        """The next token from float32 logits, which are not changed, and their peaks; `allowed_V` is a grammar's mask.

        Raises `ModelError` where the logits are not numbers.
        """
        given_V = logits_V
        if allowed_V is not None:
            logits_V = logits_V.masked_fill(~allowed_V, -math.inf)
        if self._withholds:
            without = logits_V.index_fill(0, self._stops, -math.inf)
            # A grammar that is complete allows nothing else.
            logits_V = without if without.max() > -math.inf else logits_V
        if len(self._biased):
            logits_V = logits_V.index_add(0, self._biased, self._bias)
        return self._sampler.choose(logits_V, peaks_P if logits_V is given_V else None)

    def guess(self, tokens_K: np.ndarray, logprob_K: np.ndarray, ahead: int) -> tuple[int, float]:
        """Return a draft's proposal for the place `ahead` of the next one, and a confidence (`Sampler.guess`)."""
        return self._sampler.guess(tokens_K, logprob_K, ahead)

    def keys(self, ahead: int, count: int) -> list[int]:
        """Return the keys with which `guess` draws for so many places (`Sampler.keys`)."""
        return self._sampler.keys(ahead, count)

    @property
    def sampling(self) -> Sampling:
        """The options by which tokens are chosen."""
        return self._sampler.sampling

    def accept(self, token: int) -> None:
        self._accepted += 1
        self._sampler.accept(token)

    @property
    def is_random(self) -> bool:
        """True if tokens are drawn, and not the likeliest taken."""
        return self._sampler.sampling.temperature > 0

    @property
    def _withholds(self) -> bool:
        return self._accepted < self._min_tokens and len(self._stops) > 0


def sampling_of(options: SamplingOptions) -> Sampling:
    """The options that the decoder's sampler knows; raises `WorkloadError` for one that is out of range."""
    return Sampling(**{field.name: getattr(options, field.name) for field in fields(Sampling)})


def logprob(logits_V: torch.Tensor, token: int, top: int, asked: Sequence[int] = ()) -> TokenLogprob:
    """Return the model's own log-probability of a token, before any option, its `top` most likely ones, and `asked`."""
    logprob_V = logits_V.log_softmax(-1)
    best = logprob_V.topk(top)
    return TokenLogprob(
        token=token,
        logprob=float(logprob_V[token]),
        top=list(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
        asked=logprob_V[list(asked)].tolist() if asked else [],
    )
