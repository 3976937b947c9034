"""Choosing the next token: penalties, temperature, top-k, top-p, min-p, and a random generator for each sequence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from torchwright.errors import WorkloadError, unknown

SEEDS = 2**63


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen, in the order of the fields below, temperature after the penalties."""

    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the answer are divided by it, or multiplied where they are negative (CTRL)."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token in the answer."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time it is in the answer."""
    temperature: float = 0.0
    """Logits are divided by it; 0 takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens and those that tie with the last; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens that together reach this probability (Holtzman et al., 2020)."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one's probability (Nguyen et al., 2024)."""

    def __post_init__(self) -> None:
        finite = -math.inf, math.inf
        self._check("repetition_penalty", 0 < self.repetition_penalty < math.inf, "more than 0")
        self._check("presence_penalty", finite[0] < self.presence_penalty < finite[1], "a finite number")
        self._check("frequency_penalty", finite[0] < self.frequency_penalty < finite[1], "a finite number")
        self._check("temperature", 0 <= self.temperature < math.inf, "0 or more")
        self._check("top_k", isinstance(self.top_k, int) and self.top_k >= 0, "0 (all tokens) or more")
        self._check("top_p", 0 < self.top_p <= 1, "more than 0, at most 1")
        self._check("min_p", 0 <= self.min_p <= 1, "0 to 1")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Sampling:
        """From named options; raises `UnknownName` for one that is no field."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise unknown("sampling option", name, known)
        return cls(**options)

    def _check(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise WorkloadError(f"{name} {getattr(self, name)}", allowed=allowed)


class Sampler:
    """One sequence's choices: its options, its own random generator, and the tokens it has had.

    What a sequence draws depends on its logits, its options and its seed, never on other sequences.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int], seed: int) -> None:
        self.sampling = sampling
        self._random = torch.Generator().manual_seed(seed % SEEDS)
        self._prompt = torch.tensor(sorted(set(prompt)))
        self._answer: Counter[int] = Counter()

    def __call__(self, logits_V: torch.Tensor) -> int:
        """The next token from logits (V,), which are not changed."""
        logits_V = self._penalized(logits_V.cpu())
        if self.sampling.temperature == 0:
            token = int(logits_V.argmax())
        else:
            # float64, and the largest logit at 0: over a tiny temperature a float32 logit is infinite.
            logits_V = (logits_V.double() - logits_V.max()) / self.sampling.temperature
            kept_V = _kept(logits_V.softmax(-1), self.sampling)
            token = int(torch.multinomial(kept_V, 1, generator=self._random))
        self._answer[token] += 1
        return token

    def _penalized(self, logits_V: torch.Tensor) -> torch.Tensor:
        sampling = self.sampling
        plain = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        if plain == (1, 0, 0):
            return logits_V
        logits_V = logits_V.clone()
        answer = torch.tensor(list(self._answer), dtype=torch.long)
        seen = torch.cat([self._prompt, answer]).unique()
        had = logits_V[seen]
        logits_V[seen] = torch.where(
            had > 0, had / sampling.repetition_penalty, had * sampling.repetition_penalty
        )
        count = torch.tensor(list(self._answer.values()), dtype=logits_V.dtype)
        logits_V[answer] -= sampling.presence_penalty + sampling.frequency_penalty * count
        return logits_V


def _kept(probability_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The probabilities with those of dropped tokens set to 0, not scaled back to a sum of 1."""
    if 0 < sampling.top_k < len(probability_V):
        least = probability_V.topk(sampling.top_k).values[-1]
        probability_V = torch.where(probability_V >= least, probability_V, 0.0)
    if sampling.top_p < 1:
        ordered, token = probability_V.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered
        dropped = token[before >= sampling.top_p * probability_V.sum()]
        probability_V = probability_V.index_fill(0, dropped, 0.0)
    if sampling.min_p > 0:
        least = sampling.min_p * probability_V.max()
        probability_V = torch.where(probability_V >= least, probability_V, 0.0)
    return probability_V
