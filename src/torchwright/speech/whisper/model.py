"""A Whisper of any size over a sound of any length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from torchwright.errors import ModelError, WorkloadError, unknown
from torchwright.hub.fields import Fields
from torchwright.hub.folder import read_config
from torchwright.speech.base import Recognizer
from torchwright.speech.calls import CacheSizes
from torchwright.speech.pauses import is_silent, parts
from torchwright.speech.sound import RATE, Sound, of_samples
from torchwright.speech.steps import Encoded, SpeechModel
from torchwright.speech.together import Reading, together
from torchwright.speech.transcript import Options, Segment, Window, Word, compression_ratio
from torchwright.speech.whisper.align import read_heads, smooth, starts
from torchwright.speech.whisper.attempt import Attempt, Limits, decode
from torchwright.speech.whisper.features import HOP, LogMel
from torchwright.speech.whisper.pieces import FRAMES_PER_TICK, Piece, cut
from torchwright.speech.whisper.tracks import Track, in_order
from torchwright.speech.whisper.vocabulary import TICK_SECONDS, read_vocabulary
from torchwright.speech.whisper.words import timed


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
        self.window = self.features.frames * HOP
        self.limits = Limits()
        self.heads = read_heads(
            folder, config.integer("decoder_layers", 4), config.integer("decoder_attention_heads", 6)
        )

    @classmethod
    def cache(cls, folder: Path) -> CacheSizes:
        config = Fields(folder / "config.json", read_config(folder))
        heads = config.integer("decoder_attention_heads", 6)
        return CacheSizes(
            layers=config.integer("decoder_layers", 4),
            heads=heads,
            head_dim=config.integer("d_model", 384) // heads,
            positions=config.integer("max_target_positions", 448),
            states=config.integer("max_source_positions", 1500),
        )

    def check(self, options: Options) -> None:
        languages = self.vocabulary.languages
        if not languages and options.translate:
            raise WorkloadError(f"{self.folder.name} knows English alone and does not translate")
        if options.prompt and self.vocabulary.previous is None:
            raise WorkloadError(
                f"{self.folder.name} was trained without text before a window, and takes no prompt"
            )
        if options.language is None:
            return
        if languages and options.language not in languages:
            raise unknown("language", options.language, languages)
        if not languages and options.language != "en":
            raise WorkloadError(
                f"{self.folder.name} knows English alone", found=f"language {options.language}"
            )

    def recognize(self, sound: Sound, options: Options) -> Iterator[Window]:
        before = self._prompted(options.prompt)
        if options.batch == 1:
            tracks: Iterable[Track] = [Track(sound, before=before)]
        else:
            tracks = (
                Track(of_samples(samples), begin=begin, before=list(before))
                for begin, samples in parts(sound, self.window)
            )
        return in_order(tracks, options.batch, _Rounds(self, options, sound.seconds).advance)

    def encode(self, samples: np.ndarray) -> Encoded:
        """What the encoder makes of a window's samples."""
        return self.model.encode(self.heard(samples))

    def heard(self, samples: np.ndarray) -> torch.Tensor:
        return self.features(samples)

    def begin(self, language: str | None) -> list[int]:
        return self.vocabulary.prompt(language, "transcribe")

    def language(self, encoded: Encoded) -> str:
        """The code of the language that is likeliest in a window."""
        codes = list(self.vocabulary.languages)
        if not codes:
            return "en"
        steps = self.model.steps(encoded)
        logits_V = steps.logits(steps.read([self.vocabulary.start])[-1])
        return codes[int(logits_V[list(self.vocabulary.languages.values())].argmax())]

    def decode(
        self, encoded: Encoded, before: Sequence[int], prompt: Sequence[int], limits: Limits, *, seed: int
    ) -> Reading[Attempt]:
        """A window's tokens after the text of the windows before, as much of it as half the positions hold."""
        previous = self.vocabulary.previous
        if before and previous is not None:
            prompt = [previous, *before[-(self.positions // 2 - 1) :], *prompt]
        return decode(
            partial(self.model.steps, encoded),
            prompt,
            self.vocabulary,
            room=self.positions - len(prompt),
            limits=limits,
            ratio=lambda tokens: compression_ratio(self.text(tokens)),
            seed=seed,
        )

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


class _Rounds:
    """What is asked of one sound: in each round, every track's next window is decoded beside the others'."""

    def __init__(self, whisper: Whisper, options: Options, total: float | None) -> None:
        self._whisper, self._options, self._total = whisper, options, total
        self._limits = whisper.limits.starting_at(options.temperature)
        self._language = options.language

    def advance(self, tracks: Sequence[Track]) -> None:
        """One more window of each, or its end."""
        whisper, heard = self._whisper, list[tuple[Track, int, Encoded]]()
        for track in tracks:
            samples = track.sound.window(track.frame * HOP, whisper.window)
            if len(samples) < HOP:
                track.done = True
            elif self._options.batch > 1 and is_silent(samples):
                self._put(track, track.frame * HOP + len(samples), [])
                track.frame += len(samples) // HOP
            else:
                encoded = whisper.encode(samples)
                self._language = self._language or whisper.language(encoded)
                heard.append((track, len(samples), encoded))
        task = "translate" if self._options.translate else "transcribe"
        prompt = whisper.vocabulary.prompt(self._language, task)
        readings = [
            whisper.decode(encoded, track.before, prompt, self._limits, seed=track.begin // HOP + track.frame)
            for track, _, encoded in heard
        ]
        for (track, count, encoded), found in zip(heard, together(readings), strict=True):
            self._take(track, count, encoded, prompt, found)

    def _take(
        self, track: Track, count: int, encoded: Encoded, prompt: Sequence[int], found: Attempt
    ) -> None:
        """What was found in a window of so many samples, after which the track's next one begins."""
        frames = count // HOP
        pieces, ahead = cut(found.tokens, self._whisper.vocabulary, frames)
        if found.silent(self._limits):
            pieces, ahead = [], frames
        track.before += [token for piece in pieces for token in piece.tokens]
        if found.temperature > self._limits.forget:
            track.before = []
        start = (track.begin + track.frame * HOP) / RATE
        segments = [self._segment(piece, found, start, count / RATE) for piece in pieces]
        if self._options.timestamps == "word" and pieces:
            words = self._words(pieces, prompt, encoded, min(ahead, frames) // FRAMES_PER_TICK)
            segments = [
                _with_words(segment, own, start) for segment, own in zip(segments, words, strict=True)
            ]
        until = track.frame * HOP + (ahead * HOP if ahead < frames else count)
        track.frame += min(ahead, frames)
        self._put(track, until, segments)

    def _put(self, track: Track, until: int, segments: Sequence[Segment]) -> None:
        track.found.append(
            Window(
                until=(track.begin + until) / RATE,
                total=self._total,
                segments=tuple(segment for segment in segments if segment.text),
                language=self._language,
            )
        )

    def _segment(self, piece: Piece, found: Attempt, start: float, longest: float) -> Segment:
        """A piece of a window that begins at `start` seconds and holds `longest` seconds of sound."""
        return Segment(
            start=start + min(piece.begin * TICK_SECONDS, longest),
            end=start + min(piece.end * TICK_SECONDS, longest),
            text=self._whisper.text(piece.tokens).strip(),
            tokens=piece.tokens,
            mean_logprob=found.mean_logprob,
            temperature=found.temperature,
            no_speech=found.no_speech,
        )

    def _words(
        self, pieces: Sequence[Piece], prompt: Sequence[int], encoded: Encoded, ticks: int
    ) -> list[list[Word]]:
        """Each piece's words, in seconds from the window's beginning; all were said in its first ticks."""
        whisper, language = self._whisper, "en" if self._options.translate else self._language
        texts = [whisper.vocabulary.text(piece.tokens) for piece in pieces]
        said = [token for text in texts for token in text]
        ids = [*prompt, whisper.vocabulary.no_timestamps, *said, whisper.vocabulary.end]
        ids = ids[: whisper.positions]  # the end may not fit; its own row is not wanted
        looks_HTS = whisper.model.cross_attention(whisper.heads, ids, encoded)
        rows = slice(len(prompt), len(prompt) + len(said) + 1)  # what follows a token is chosen in its row
        begins = TICK_SECONDS * starts(smooth(looks_HTS[..., : max(1, ticks)])[rows])
        return timed(texts, begins.tolist(), whisper.tokenizer.decode, language)


def _with_words(segment: Segment, words: Sequence[Word], start: float) -> Segment:
    """A segment with its words, which say more precisely when it was said."""
    if not words:
        return segment
    moved = tuple(Word(start=start + w.start, end=start + w.end, text=w.text) for w in words)
    return replace(segment, start=moved[0].start, end=moved[-1].end, words=moved)
