"""A Whisper of any size over a sound of any length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from torchwright.core.errors import ModelError, UnknownName, WorkloadError
from torchwright.hub.fields import Fields
from torchwright.hub.folder import read_config
from torchwright.models.speech.base import Recognizer
from torchwright.models.speech.calls import CacheSizes
from torchwright.models.speech.languages import language_code
from torchwright.models.speech.pauses import PAUSE, is_silent, loud_frames, parts
from torchwright.models.speech.sound import RATE, Sound, of_samples
from torchwright.models.speech.steps import Encoded, SpeechModel
from torchwright.models.speech.together import Reading, together
from torchwright.models.speech.transcript import Options, Segment, Unheard, Window, Word, compression_ratio
from torchwright.models.speech.voice import Voice, find_voice
from torchwright.models.speech.whisper.align import read_heads, smooth, starts
from torchwright.models.speech.whisper.attempt import Attempt, Limits, attempt, decode, unsure
from torchwright.models.speech.whisper.features import HOP, LogMel
from torchwright.models.speech.whisper.pieces import FRAMES_PER_TICK, Piece, cut
from torchwright.models.speech.whisper.times import Span, apart, trimmed
from torchwright.models.speech.whisper.tracks import Track, in_order
from torchwright.models.speech.whisper.vocabulary import TICK_SECONDS, read_vocabulary
from torchwright.models.speech.whisper.words import timed


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
        self.limits, self.attempt = Limits(), attempt
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
        self.code(options.language)

    def code(self, language: str | None) -> str | None:
        """Return the code of a language by its name or code.

        Raises `UnknownName` for one that this model does not know, and `WorkloadError` for any but English where it
        knows no other.
        """
        if language is None:
            return None
        if self.vocabulary.languages:
            return language_code(language, self.vocabulary.languages)
        try:
            return language_code(language, ["en"])
        except UnknownName as error:
            raise WorkloadError(
                f"{self.folder.name} knows English alone", found=f"language {language}"
            ) from error

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
        """Encode a window's samples."""
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
        """Decode a window after the text of earlier windows, which may fill half of the positions."""
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
            attempt=self.attempt,
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
        """Return the text of tokens, without timestamps."""
        return self.tokenizer.decode(self.vocabulary.text(tokens))


@dataclass(frozen=True)
class _Heard:
    """A window that is decoded: its samples, where a voice is in them if that was asked, and the encoder's states."""

    samples: np.ndarray
    voice: Voice | None
    encoded: Encoded


class _Rounds:
    """Decoding rounds over one recording: each round decodes the next window of every track as a batch."""

    def __init__(self, whisper: Whisper, options: Options, total: float | None) -> None:
        self._whisper, self._options, self._total = whisper, options, total
        self._limits = whisper.limits.starting_at(options.temperature)
        self._language = whisper.code(options.language)

    def advance(self, tracks: Sequence[Track]) -> None:
        """One more window of each, or its end."""
        whisper, heard = self._whisper, list[tuple[Track, _Heard]]()
        for track in tracks:
            samples = track.sound.window(track.frame * HOP, whisper.window)
            if len(samples) < HOP:
                track.done = True
                continue
            voice = find_voice(samples) if self._options.only_speech else None
            if voice is not None and not voice.anywhere:
                # A word that begins in the last second belongs to the next window.
                count = len(samples) - RATE if len(samples) == whisper.window > 2 * RATE else len(samples)
                self._pass(track, count, voice.instead(0, count / RATE))
            elif self._options.batch > 1 and is_silent(samples):
                self._pass(track, len(samples), "silence")
            else:
                encoded = whisper.encode(samples)
                self._language = self._language or whisper.language(encoded)
                heard.append((track, _Heard(samples, voice, encoded)))
        task = "translate" if self._options.translate else "transcribe"
        prompt = whisper.vocabulary.prompt(self._language, task)
        readings = [
            whisper.decode(
                window.encoded, track.before, prompt, self._limits, seed=track.begin // HOP + track.frame
            )
            for track, window in heard
        ]
        for (track, window), found in zip(heard, together(readings), strict=True):
            self._take(track, window, prompt, found)

    def _pass(self, track: Track, count: int, reason: str) -> None:
        """Go on behind so many samples without speech."""
        begin, until = track.frame * HOP, track.frame * HOP + count
        track.frame += count // HOP
        without = Unheard(start=(track.begin + begin) / RATE, end=(track.begin + until) / RATE, reason=reason)
        self._put(track, until, [], [without])

    def _take(self, track: Track, window: _Heard, prompt: Sequence[int], found: Attempt) -> None:
        """Take what was found in a window, after which the track's next window begins."""
        count = len(window.samples)
        frames, start = count // HOP, (track.begin + track.frame * HOP) / RATE
        pieces, ahead = cut(found.tokens, self._whisper.vocabulary, frames)
        loud_T = loud_frames(window.samples)[: max(1, frames // FRAMES_PER_TICK)]
        spans = _spans(pieces, loud_T)
        unheard = list[Unheard]()
        if found.silent(self._limits) or (self._options.only_speech and pieces):
            ratio = compression_ratio(self._whisper.text(found.tokens))
            if reason := unsure(found, ratio, self._limits):
                unheard.append(Unheard(start=start, end=start + count / RATE, reason=reason))
                pieces, spans, ahead = [], [], frames
        if window.voice is not None:
            pieces, spans, without = _spoken(pieces, spans, window.voice, start)
            unheard += without
        track.before += [token for piece in pieces for token in piece.tokens]
        if found.temperature > self._limits.forget:
            track.before = []
        segments = [
            self._segment(piece, span, found, start) for piece, span in zip(pieces, spans, strict=True)
        ]
        if self._options.timestamps == "word" and pieces:
            settled_T = loud_T[: max(1, min(ahead, frames) // FRAMES_PER_TICK)]
            words = self._words(pieces, spans, prompt, window.encoded, settled_T)
            segments = [
                _with_words(segment, own, start) for segment, own in zip(segments, words, strict=True)
            ]
        until = track.frame * HOP + (ahead * HOP if ahead < frames else count)
        track.frame += min(ahead, frames)
        self._put(track, until, segments, unheard)

    def _put(self, track: Track, until: int, segments: Sequence[Segment], unheard: Sequence[Unheard]) -> None:
        track.found.append(
            Window(
                until=(track.begin + until) / RATE,
                total=self._total,
                segments=tuple(segment for segment in segments if segment.text),
                language=self._language,
                unheard=tuple(unheard),
            )
        )

    def _segment(self, piece: Piece, span: Span, found: Attempt, start: float) -> Segment:
        """Return a piece of a window that begins at `start` seconds; the span is in ticks."""
        return Segment(
            start=start + span[0] * TICK_SECONDS,
            end=start + span[1] * TICK_SECONDS,
            text=self._whisper.text(piece.tokens).strip(),
            tokens=piece.tokens,
            mean_logprob=found.mean_logprob,
            temperature=found.temperature,
            no_speech=found.no_speech,
        )

    def _words(
        self,
        pieces: Sequence[Piece],
        spans: Sequence[Span],
        prompt: Sequence[int],
        encoded: Encoded,
        loud_T: np.ndarray,
    ) -> list[list[Word]]:
        """Return each piece's words in ticks; all were said in the ticks of `loud_T`."""
        whisper, language = self._whisper, "en" if self._options.translate else self._language
        texts = [whisper.vocabulary.text(piece.tokens) for piece in pieces]
        said = [token for text in texts for token in text]
        ids = [*prompt, whisper.vocabulary.no_timestamps, *said, whisper.vocabulary.end]
        ids = ids[: whisper.positions]  # the end may not fit; its own row is not wanted
        looks_HTS = whisper.model.cross_attention(whisper.heads, ids, encoded)
        rows = slice(len(prompt), len(prompt) + len(said) + 1)  # what follows a token is chosen in its row
        begins = starts(smooth(looks_HTS[..., : len(loud_T)])[rows])
        return timed(texts, begins.tolist(), spans, loud_T, whisper.tokenizer.decode, language)


def _spoken(
    pieces: Sequence[Piece], spans: Sequence[Span], voice: Voice, start: float
) -> tuple[list[Piece], list[Span], list[Unheard]]:
    """Return the pieces at whose time there is a voice, their spans, and what is left out."""
    kept, unheard = list[tuple[Piece, Span]](), list[Unheard]()
    for piece, span in zip(pieces, spans, strict=True):
        begin, end = (tick * TICK_SECONDS for tick in span)
        if voice.during(begin, end):
            kept.append((piece, span))
        else:
            reason = voice.instead(begin, end)
            unheard.append(Unheard(start=start + begin, end=start + end, reason=reason))
    return [piece for piece, _ in kept], [span for _, span in kept], unheard


def _spans(pieces: Sequence[Piece], loud_T: np.ndarray) -> list[Span]:
    """Return when each piece was said, in ticks: by its timestamps, without long pauses around its sound.

    A model may place a piece behind the sound's end.
    """
    ticks = len(loud_T)
    said = [(float(min(piece.begin, ticks)), float(min(piece.end, ticks))) for piece in pieces]
    return apart([trimmed(span, loud_T, PAUSE) for span in said], ticks)


def _with_words(segment: Segment, words: Sequence[Word], start: float) -> Segment:
    """Return a segment with its words, which say more precisely when it was said."""
    if not words:
        return segment
    moved = tuple(
        Word(start=start + w.start * TICK_SECONDS, end=start + w.end * TICK_SECONDS, text=w.text)
        for w in words
    )
    return replace(segment, start=moved[0].start, end=moved[-1].end, words=moved)
