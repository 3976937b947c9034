"""A Whisper of any size over a sound of any length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchwright.errors import ModelError, WorkloadError, unknown
from torchwright.hub.fields import Fields
from torchwright.hub.folder import read_config
from torchwright.speech.base import Recognizer
from torchwright.speech.sound import RATE, Sound
from torchwright.speech.steps import Steps
from torchwright.speech.transcript import Options, Segment, Window, Word, compression_ratio
from torchwright.speech.whisper.align import cross_attention, read_heads, smooth, starts
from torchwright.speech.whisper.attempt import Attempt, Limits, decode
from torchwright.speech.whisper.features import HOP, LogMel
from torchwright.speech.whisper.pieces import FRAMES_PER_TICK, Piece, cut
from torchwright.speech.whisper.vocabulary import TICK_SECONDS, read_vocabulary
from torchwright.speech.whisper.words import split


class Whisper(Recognizer):
    """Whisper: tiny to large-v3, turbo, distil-whisper; English-only and multilingual."""

    model_type = "whisper"

    def __init__(self, folder: Path, model: Any) -> None:
        super().__init__(folder, model)
        config = Fields(folder / "config.json", read_config(folder))
        positions = config.integer("max_source_positions", 1500)
        self.positions = config.integer("max_target_positions", 448)
        self.vocabulary = read_vocabulary(folder, self.tokenizer)
        if self.vocabulary.size - self.vocabulary.first_tick <= positions:
            raise ModelError(
                f"{folder} has no timestamps for a whole window",
                found=f"{self.vocabulary.size - self.vocabulary.first_tick} of them",
                allowed=f"{positions + 1}",
            )
        self.features = LogMel(
            folder, bands=config.integer("num_mel_bins", 80), frames=positions * FRAMES_PER_TICK
        )
        self.limits = Limits()
        self.heads = read_heads(
            folder, config.integer("decoder_layers", 4), config.integer("decoder_attention_heads", 6)
        )

    def check(self, options: Options) -> None:
        languages = self.vocabulary.languages
        if not languages and options.translate:
            raise WorkloadError(f"{self.folder} knows English alone and does not translate")
        if options.language is None:
            return
        if languages and options.language not in languages:
            raise unknown("language", options.language, languages)
        if not languages and options.language != "en":
            raise WorkloadError(f"{self.folder} knows English alone", found=f"language {options.language}")

    def recognize(self, sound: Sound, options: Options) -> Iterator[Window]:
        task = "translate" if options.translate else "transcribe"
        language, before, frame = options.language, self._prompted(options.prompt), 0
        limits = self.limits.starting_at(options.temperature)
        while len(samples := sound.window(frame * HOP, self.features.frames * HOP)) >= HOP:
            frames, states_1SE = len(samples) // HOP, self.encode(samples)
            language = language or self.language(states_1SE)
            prompt = self.vocabulary.prompt(language, task)
            found = self.decode(states_1SE, before, prompt, limits, seed=frame)
            pieces, ahead = cut(found.tokens, self.vocabulary, frames)
            if found.silent(limits):
                pieces, ahead = [], frames
            before += [token for piece in pieces for token in piece.tokens]
            if found.temperature > limits.forget:
                before = []
            start, heard = frame * HOP / RATE, len(samples) / RATE
            segments = [self._segment(piece, found, start, heard) for piece in pieces]
            if options.timestamps == "word" and pieces:
                spoken = "en" if options.translate else language
                words = self._words(pieces, prompt, states_1SE, min(ahead, frames) // FRAMES_PER_TICK, spoken)
                segments = [
                    _with_words(segment, own, start) for segment, own in zip(segments, words, strict=True)
                ]
            frame += min(ahead, frames)
            yield Window(
                until=frame * HOP / RATE if ahead < frames else start + heard,
                total=sound.seconds,
                segments=tuple(segment for segment in segments if segment.text),
                language=language,
            )

    def encode(self, samples: np.ndarray) -> torch.Tensor:
        """The encoder's output (1, S, E) for a window's samples."""
        return self.model.get_encoder()(self.features(samples).to(self.dtype)).last_hidden_state

    def language(self, states_1SE: torch.Tensor) -> str:
        """The code of the language that is likeliest in a window."""
        codes = list(self.vocabulary.languages)
        if not codes:
            return "en"
        steps = Steps(self.model, states_1SE)
        logits_V = steps.logits(steps.read([self.vocabulary.start])[-1])
        return codes[int(logits_V[list(self.vocabulary.languages.values())].argmax())]

    def decode(
        self,
        states_1SE: torch.Tensor,
        before: Sequence[int],
        prompt: Sequence[int],
        limits: Limits,
        *,
        seed: int,
    ) -> Attempt:
        """A window's tokens after the text of the windows before, as much of it as half the positions hold."""
        previous = self.vocabulary.previous
        if before and previous is not None:
            prompt = [previous, *before[-(self.positions // 2 - 1) :], *prompt]
        return decode(
            partial(Steps, self.model, states_1SE),
            prompt,
            self.vocabulary,
            room=self.positions - len(prompt),
            limits=limits,
            ratio=lambda tokens: compression_ratio(self.text(tokens)),
            seed=seed,
        )

    def _words(
        self,
        pieces: Sequence[Piece],
        prompt: Sequence[int],
        states_1SE: torch.Tensor,
        ticks: int,
        language: str,
    ) -> Iterator[list[Word]]:
        """Each piece's words, in seconds from the window's beginning; all were said in its first ticks."""
        texts = [self.vocabulary.text(piece.tokens) for piece in pieces]
        said = [token for text in texts for token in text]
        ids = [*prompt, self.vocabulary.no_timestamps, *said, self.vocabulary.end]
        ids = ids[: self.positions]  # the end may not fit; its own row is not wanted
        looks_HTS = cross_attention(self.model.get_decoder(), self.heads, ids, states_1SE)
        rows = slice(len(prompt), len(prompt) + len(said) + 1)  # what follows a token is chosen in its row
        begins = TICK_SECONDS * starts(smooth(looks_HTS[..., : max(1, ticks)])[rows])
        place = 0
        for text in texts:
            words = list[Word]()
            for span in split(text, self.tokenizer.decode, language):
                start, end = begins[place], begins[place + span.tokens]
                place += span.tokens
                if span.text.strip():
                    words.append(Word(start=float(start), end=float(end), text=span.text))
            yield words

    def _prompted(self, text: str) -> list[int]:
        """A caller's text as the tokens before the first window."""
        tokens = self.tokenizer.encode(f" {text.strip()}", add_special_tokens=False).ids if text else []
        if self.vocabulary.text(tokens) != tokens:
            raise WorkloadError(
                "the prompt holds special tokens", found=repr(text[:100]), allowed="plain text"
            )
        return tokens

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens say, without timestamps."""
        return self.tokenizer.decode(self.vocabulary.text(tokens))

    def _segment(self, piece: Piece, found: Attempt, start: float, longest: float) -> Segment:
        """A piece of a window that begins at `start` seconds and holds `longest` seconds of sound."""
        return Segment(
            start=start + min(piece.begin * TICK_SECONDS, longest),
            end=start + min(piece.end * TICK_SECONDS, longest),
            text=self.text(piece.tokens).strip(),
            tokens=piece.tokens,
            mean_logprob=found.mean_logprob,
            temperature=found.temperature,
            no_speech=found.no_speech,
        )


def _with_words(segment: Segment, words: Sequence[Word], start: float) -> Segment:
    """A segment with its words, which say more precisely when it was said."""
    if not words:
        return segment
    moved = tuple(Word(start=start + w.start, end=start + w.end, text=w.text) for w in words)
    return replace(segment, start=moved[0].start, end=moved[-1].end, words=moved)
