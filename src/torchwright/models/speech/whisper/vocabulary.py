"""Whisper's special tokens by their meaning, and which ids may follow which."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import ModelError
from torchwright.hub.fields import Fields
from torchwright.hub.folder import find_object, read_config

TICK_SECONDS = 0.02
"""Between two timestamps that follow each other: two frames of features."""
MAX_INITIAL = 50
"""Ticks at which the first timestamp of a window may lie, at most, where the folder does not say."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Token ids. In their order: text, `end`, the other special ones, `no_timestamps`, then one for each tick."""

    size: int
    start: int
    end: int
    no_timestamps: int
    previous: int | None
    """Before the text of the window before."""
    tasks: dict[str, int]
    languages: dict[str, int]
    """By code. Empty for a model of one language, which is English."""
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    max_initial: int

    @property
    def first_tick(self) -> int:
        """The timestamp of the window's beginning."""
        return self.no_timestamps + 1

    @property
    def no_speech(self) -> int:
        """Its probability in the place of the language is how likely nothing is said."""
        return self.no_timestamps - 1

    def prompt(self, language: str | None, task: str) -> list[int]:
        """Return the tokens before a window's text."""
        if not self.languages:
            return [self.start]
        return [self.start, self.languages[language or "en"], self.tasks[task]]

    def ticks(self, tokens: Sequence[int]) -> list[int]:
        """Those of the tokens that are timestamps, in ticks."""
        return [token - self.first_tick for token in tokens if token >= self.first_tick]

    def text(self, tokens: Sequence[int]) -> list[int]:
        """Those of the tokens that are text."""
        return [token for token in tokens if token < self.end]


def read_vocabulary(folder: Path, tokenizer: Any) -> Vocabulary:
    """From the folder's configurations and tokenizer; raises `ModelError` where they are not Whisper's."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    config = Fields(folder / "config.json", read_config(folder))
    generation = find_object(folder / "generation_config.json")
    wanted = Fields(folder / "generation_config.json", config.data | generation)
    found = {
        name: tokenizer.token_to_id(f"<|{name}|>") for name in ("notimestamps", "transcribe", "translate")
    }
    size, end = config.integer("vocab_size"), wanted.integer("eos_token_id", minimum=0)
    no_timestamps = found.pop("notimestamps")
    if no_timestamps is None:
        raise ModelError(f"the tokenizer of {folder} is not Whisper's", found="no <|notimestamps|> in it")
    if not end < no_timestamps < size - 1:
        raise ModelError(
            f"config.json and tokenizer.json of {folder} do not belong together",
            found=f"vocab_size {size}, end {end}, <|notimestamps|> {no_timestamps}",
        )
    several = wanted.flag("is_multilingual", None not in found.values())
    codes = {code: tokenizer.token_to_id(f"<|{code}|>") for code in LANGUAGES}
    return Vocabulary(
        size=size,
        start=wanted.integer("decoder_start_token_id", minimum=0),
        end=end,
        no_timestamps=no_timestamps,
        previous=tokenizer.token_to_id("<|startofprev|>"),
        tasks={name: token for name, token in found.items() if token is not None},
        languages={code: token for code, token in codes.items() if token is not None} if several else {},
        # No special token is ever text, and which tick comes next is `allow`'s business.
        suppressed=(*_ids(wanted, "suppress_tokens", size), *range(end + 1, no_timestamps + 1)),
        suppressed_first=_ids(wanted, "begin_suppress_tokens", size),
        max_initial=wanted.integer("max_initial_timestamp_index", MAX_INITIAL, minimum=0),
    )


def allow(logits_V: torch.Tensor, tokens: Sequence[int], vocabulary: Vocabulary) -> torch.Tensor:
    """Logits (V,) with −∞ for what may not follow a window's `tokens`.

    Timestamps come in pairs around text and never go back: the first token is one, after a pair comes text, after text
    and one timestamp its twin or the end. Where all timestamps together are likelier than any text, it is one
    (openai/whisper, decoding.py: ApplyTimestampRules).
    """
    first, out_V = vocabulary.first_tick, logits_V.clone()
    out_V[list(vocabulary.suppressed)] = -math.inf
    ticks = vocabulary.ticks(tokens)
    after_tick = bool(tokens) and tokens[-1] >= first
    paired = len(tokens) < 2 or tokens[-2] >= first
    if not tokens:
        out_V[list(vocabulary.suppressed_first)] = -math.inf
        out_V[:first] = -math.inf
        out_V[first + vocabulary.max_initial + 1 :] = -math.inf
    elif after_tick and paired:
        out_V[first:] = -math.inf
    elif after_tick:
        out_V[: vocabulary.end] = -math.inf
    if ticks:
        twin = after_tick and not paired
        out_V[first : first + ticks[-1] + (0 if twin else 1)] = -math.inf
    logprobs_V = out_V.log_softmax(-1)
    if logprobs_V[first:].logsumexp(-1) > logprobs_V[:first].max():
        out_V[:first] = -math.inf
    return out_V


def _ids(fields: Fields, key: str, size: int) -> tuple[int, ...]:
    ids = tuple(
        token for token in fields.ids(key) if token >= 0
    )  # −1 stood for "the usual ones" in old folders
    if any(token >= size for token in ids):
        raise fields.wrong(key, f"token ids below {size}")
    return ids
