"""A Whisper of any size over a sound of any length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from torchwright.errors import ModelError, WorkloadError, unknown
from torchwright.hub.fields import Fields
from torchwright.hub.folder import read_config
from torchwright.speech.base import Options, Recognizer, Segment, Window
from torchwright.speech.sound import RATE, Sound
from torchwright.speech.steps import Encoded, SpeechModel
from torchwright.speech.whisper.attempt import Attempt, Limits, compression_ratio, decode
from torchwright.speech.whisper.features import HOP, LogMel
from torchwright.speech.whisper.pieces import FRAMES_PER_TICK, Piece, cut
from torchwright.speech.whisper.vocabulary import TICK_SECONDS, read_vocabulary


class Whisper(Recognizer):
    """Whisper: tiny to large-v3, turbo, distil-whisper; English-only and multilingual."""

    model_type = "whisper"

    def __init__(self, folder: Path, model: SpeechModel) -> None:
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

    def check(self, options: Options) -> None:
        languages = self.vocabulary.languages
        if options.timestamps == "word":
            raise WorkloadError("words are not placed in time yet", allowed="timestamps of segments")
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
        language, before, frame = options.language, list[int](), 0
        while len(samples := sound.window(frame * HOP, self.features.frames * HOP)) >= HOP:
            frames, encoded = len(samples) // HOP, self.encode(samples)
            language = language or self.language(encoded)
            found = self.decode(encoded, before, self.vocabulary.prompt(language, task), seed=frame)
            pieces, ahead = cut(found.tokens, self.vocabulary, frames)
            if found.silent(self.limits):
                pieces, ahead = [], frames
            before += [token for piece in pieces for token in piece.tokens]
            if found.temperature > self.limits.forget:
                before = []
            start, heard = frame * HOP / RATE, len(samples) / RATE
            segments = [self._segment(piece, found, start, heard) for piece in pieces]
            frame += min(ahead, frames)
            yield Window(
                until=frame * HOP / RATE if ahead < frames else start + heard,
                total=sound.seconds,
                segments=tuple(segment for segment in segments if segment.text),
                language=language,
            )

    def encode(self, samples: np.ndarray) -> Encoded:
        """What the encoder makes of a window's samples."""
        return self.model.encode(self.features(samples))

    def language(self, encoded: Encoded) -> str:
        """The code of the language that is likeliest in a window."""
        codes = list(self.vocabulary.languages)
        if not codes:
            return "en"
        steps = self.model.steps(encoded)
        logits_V = steps.logits(steps.read([self.vocabulary.start])[-1])
        return codes[int(logits_V[list(self.vocabulary.languages.values())].argmax())]

    def decode(self, encoded: Encoded, before: Sequence[int], prompt: Sequence[int], *, seed: int) -> Attempt:
        """A window's tokens after the text of the windows before, as much of it as half the positions hold."""
        previous = self.vocabulary.previous
        if before and previous is not None:
            prompt = [previous, *before[-(self.positions // 2 - 1) :], *prompt]
        return decode(
            partial(self.model.steps, encoded),
            prompt,
            self.vocabulary,
            room=self.positions - len(prompt),
            limits=self.limits,
            ratio=lambda tokens: compression_ratio(self.text(tokens)),
            seed=seed,
        )

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
        )
