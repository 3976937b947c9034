"""Choosing the next token: penalties, temperature, top-k, top-p, min-p, and draws that are each sequence's own."""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from torchwright.core.errors import ModelError, WorkloadError, unknown
from torchwright.models.decoder.generation import race
from torchwright.models.decoder.scores import Scores

SEEDS = 2**63
LEAST_DIVISOR = 1e-30
"""Temperatures and repetition penalties below it are this one: what they prefer is drawn, and no division of a logit
overflows."""
HEADS = (256, 8192)
"""Most likely tokens that are sorted first; a whole vocabulary takes far longer than the rest of the draw."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The choice of tokens, in the order of the fields below, temperature after the penalties."""

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
        """Build it from named options; raises `UnknownName` for one that is not a field."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise unknown("sampling option", name, known)
        return cls(**options)

    def _check(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise WorkloadError(f"{name} {getattr(self, name)}", allowed=allowed)


class Sampler:
    """One sequence's choices: its options, its own draws, and the tokens it has had.

    What a sequence draws for its n-th token depends on its logits, its options, `seed`, `index` and n: never on other
    sequences, nor on draws that were thrown away.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int], seed: int, index: int = 0) -> None:
        self.sampling = sampling
        self._seed, self._index, self._drawn = seed % SEEDS, index, 0
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        self._penalizes = penalties != (1, 0, 0)
        self._prompt = torch.tensor(sorted(set(prompt)) if self._penalizes else [], dtype=torch.long)
        self._answer: Counter[int] = Counter()

    @property
    def is_argmax(self) -> bool:
        """Check whether the choice is greedy: a caller may then find it for many sequences at once."""
        return self.sampling.temperature == 0 and not self._penalizes

    def __call__(self, logits_V: torch.Tensor, peaks_P: torch.Tensor | None = None) -> int:
        """The next token, which is accepted; see `choose`."""
        token = self.choose(logits_V, peaks_P)
        self.accept(token)
        return token

    def choose(self, logits_V: torch.Tensor, peaks_P: torch.Tensor | None = None) -> int:
        """The token after the accepted ones from logits (V,), which are not changed.

        `peaks_P` are the logits' own (`Logits`), where they are known; the token is the same without them. Raises
        `ModelError` where the logits are not numbers, or all of them are minus infinity.
        """
        # Rows are short, so that NumPy on one thread is faster than operators that share them out.
        values_V = self._penalized(logits_V.cpu()).numpy()
        scores = Scores(values_V, None if peaks_P is None or self._penalizes else peaks_P.numpy())
        best = scores.argmax()
        peak = float(values_V[best])
        if not math.isfinite(peak):
            raise ModelError("the logits are not numbers", found=f"{peak} as the largest of {len(values_V)}")
        if self.sampling.temperature == 0:
            return best
        tokens, weight = _kept(scores, peak, self.sampling)
        place = race.winner(weight, tokens, self._key(self._drawn))
        return place if tokens is None else int(tokens[place])

    def guess(self, tokens_K: np.ndarray, logprob_K: np.ndarray, ahead: int) -> tuple[int, float]:
        """A draft's proposal for the place `ahead` of the next one, and a confidence from 0 to 1 in it.

        `tokens_K` are the draft's likeliest tokens, falling, with their log-probabilities, minus infinity where they
        are not numbers. The proposal is the one that `choose` would draw from them. The confidence is a greedy
        token's probability. Of a drawn one it is the geometric mean of two shares, its probability and its part of all
        speeds in the race: by these, accepted and refused proposals differ most.
        """
        if self.sampling.temperature == 0 or not math.isfinite(logprob_K[0]):
            return int(tokens_K[0]), math.exp(logprob_K[0])
        places, weight = _kept(Scores(logprob_K), float(logprob_K[0]), self.sampling)
        tokens = tokens_K if places is None else tokens_K[places]
        speeds = race.speeds(weight, tokens, self._key(self._drawn + ahead))
        first = int(speeds.argmax())
        ahead_of_all, likely = speeds[first] / speeds.sum(), weight[first] / weight.sum()
        return int(tokens[first]), math.sqrt(ahead_of_all * likely)

    def keys(self, ahead: int, count: int) -> list[int]:
        """Return the keys of the races for the places from `ahead` of the next one on; zeros where nothing is drawn."""
        if self.sampling.temperature == 0:
            return [0] * count
        return [self._key(self._drawn + place) for place in range(ahead, ahead + count)]

    def accept(self, token: int) -> None:
        """Go on to the next place; penalties count the token."""
        self._drawn += 1
        if self._penalizes:
            self._answer[token] += 1

    def _key(self, drawn: int) -> int:
        """The key of a place's race: a hash, which needs no state that could get out of step."""
        place = struct.pack("<QQQ", self._seed, self._index, drawn)
        return int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little")

    def _penalized(self, logits_V: torch.Tensor) -> torch.Tensor:
        if not self._penalizes:
            return logits_V
        sampling = self.sampling
        logits_V = logits_V.clone()
        answer = torch.tensor(list(self._answer), dtype=torch.long)
        seen = torch.cat([self._prompt, answer]).unique()
        had = logits_V[seen]
        penalty = max(sampling.repetition_penalty, LEAST_DIVISOR)
        logits_V[seen] = torch.where(had > 0, had / penalty, had * penalty)
        count = torch.tensor(list(self._answer.values()), dtype=logits_V.dtype)
        logits_V[answer] -= sampling.presence_penalty + sampling.frequency_penalty * count
        return logits_V


def _kept(scores: Scores, peak: float, sampling: Sampling) -> tuple[np.ndarray | None, np.ndarray]:
    """Tokens in order (None for all), and their weights: probabilities up to a factor, 0 for tokens that are dropped.

    `peak` is the largest of the scores.
    """
    kept, tokens = scores.values_V, None
    if 0 < sampling.top_k < len(kept):
        tokens = scores.top(sampling.top_k)
        kept = kept[tokens]
    with np.errstate(over="ignore"):  # minus infinity is then right: the token has no weight
        weight = np.exp((kept - peak) / max(sampling.temperature, LEAST_DIVISOR))
    if sampling.top_p < 1:
        dropped = np.ones(len(weight), bool)
        dropped[_nucleus(weight, sampling.top_p)] = False
        weight[dropped] = 0
    if sampling.min_p > 0:
        weight[weight < sampling.min_p * weight.max()] = 0
    return tokens, weight


def _nucleus(weight: np.ndarray, top_p: float) -> np.ndarray:
    """Places of the fewest largest weights that reach `top_p` of their sum; of equal ones the first."""
    wanted = top_p * weight.sum(dtype=np.float64)
    head = _head(weight, wanted)
    head = head[np.argsort(-weight[head], kind="stable")]
    ordered = weight[head]
    return head[ordered.cumsum(dtype=np.float64) - ordered < wanted]


def _head(weight: np.ndarray, wanted: float) -> np.ndarray:
    """Places of weights that are all larger than the others and together more than `wanted`; few if possible."""
    for count in HEADS:
        if count < len(weight):
            head = (weight > np.partition(weight, -count)[-count]).nonzero()[0]
            if weight[head].sum(dtype=np.float64) > wanted:
                return head
    return np.arange(len(weight))
