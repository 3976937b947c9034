"""Rules of generation_config.json for an answer's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchwright.hub.fields import Fields
from torchwright.models.decoder.seq2seq.stacks import start_id

NOT_FOLLOWED = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "repetition_penalty": 1.0,
    "min_length": 0,
    "do_sample": False,
}
"""Settings that would change answers here if they were followed, and what means nothing by them."""


@dataclass(frozen=True, kw_only=True)
class GenerationRules:
    """The rules of one model."""

    start: int
    """The token that the decoder reads first; it is not part of the answer."""
    stop: frozenset[int]
    first: int | None = None
    """The answer's first token, whatever the logits."""
    last: int | None = None
    """The token with which an answer at its limit ends."""
    banned: tuple[int, ...] = ()
    """Tokens that are never chosen."""
    not_followed: tuple[str, ...] = ()
    """Settings of the file that nothing here follows, in words."""

    def forced(self, place: int, limit: int) -> int | None:
        """The token that has to be there, None where it is free."""
        if place == 0 and self.first is not None:
            return self.first
        return self.last if place == limit - 1 else None

    def allowed(self, logits_V: torch.Tensor) -> torch.Tensor:
        """The logits without what is banned."""
        if not self.banned:
            return logits_V
        logits_V = logits_V.clone()
        logits_V[list(self.banned)] = -torch.inf
        return logits_V


def read_rules(fields: Fields, generation: Mapping[str, Any], vocabulary: int) -> GenerationRules:
    """From config.json and, where it says more, generation_config.json.

    Raises `ModelError`, naming the file and the key, for values that are not token ids.
    """
    # What either file leaves out is the other's; null is as good as nothing.
    merged = fields.data | {key: value for key, value in generation.items() if value is not None}
    both = Fields(fields.path, merged)
    words = merged.get("bad_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(word, list) for word in words):
        raise both.wrong("bad_words_ids", "lists of token ids")
    single = Fields(fields.path, {"bad_words_ids": [word[0] for word in words if len(word) == 1]})
    banned = single.ids("bad_words_ids") + both.ids("suppress_tokens")
    ignored = [
        f"{name} {merged[name]}"
        for name, nothing in NOT_FOLLOWED.items()
        if merged.get(name) not in (None, nothing)
    ]
    if any(len(word) > 1 for word in words):
        ignored.append("bad_words_ids of several tokens")
    first, last = both.ids("forced_bos_token_id"), both.ids("forced_eos_token_id")
    named = (*banned, *first, *last, start := start_id(fields, generation))
    wrong = next((token for token in named if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise both.wrong("decoder_start_token_id", f"token ids below {vocabulary}; {wrong} is named")
    return GenerationRules(
        start=start,
        stop=frozenset(both.ids("eos_token_id")),
        first=first[0] if first else None,
        last=last[0] if last else None,
        banned=tuple(sorted(set(banned))),
        not_followed=tuple(ignored),
    )
