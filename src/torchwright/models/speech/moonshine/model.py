"""Moonshine: the sound itself goes in, of any length that its positions hold; longer sound is cut where it is quiet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from torchwright.core.errors import WorkloadError
from torchwright.hub.fields import Fields
from torchwright.hub.folder import find_object, read_config
from torchwright.models.speech.base import Recognizer
from torchwright.models.speech.calls import CacheSizes
from torchwright.models.speech.moonshine.windows import LEAST, LONGEST, quietest, states
from torchwright.models.speech.sound import RATE, Sound
from torchwright.models.speech.steps import SpeechModel
from torchwright.models.speech.together import Reading, together
from torchwright.models.speech.transcript import Options, Segment, Unheard, Window
from torchwright.models.speech.voice import find_voice

TOKENS_PER_SECOND = 6.5
"""No speech has more; without the limit the model may repeat itself (its authors' advice)."""


class Moonshine(Recognizer):
    """Moonshine: tiny and base, each of one language; its text has no timestamps of its own."""

    model_type = "moonshine"
    window = LONGEST

    def __init__(self, folder: Path, model: SpeechModel) -> None:
        super().__init__(folder, model)
        settings = read_config(folder) | find_object(folder / "generation_config.json")
        fields = Fields(folder / "config.json", settings)
        self.start = fields.integer("decoder_start_token_id", 1, minimum=0)
        self.ends = fields.ids("eos_token_id") or (2,)
        self.positions = fields.integer("max_position_embeddings", 512)

    @classmethod
    def cache(cls, folder: Path) -> CacheSizes:
        fields = Fields(folder / "config.json", read_config(folder))
        heads = fields.integer("decoder_num_attention_heads", 8)
        return CacheSizes(
            layers=fields.integer("decoder_num_hidden_layers", 6),
            heads=fields.integer("decoder_num_key_value_heads", heads),
            head_dim=fields.integer("hidden_size", 288) // heads,
            positions=fields.integer("max_position_embeddings", 512),
            states=states(LONGEST),
        )

    def check(self, options: Options) -> None:
        if options.timestamps == "word":
            raise WorkloadError(
                "Moonshine does not say when a word was spoken",
                next="--timestamps segment, or a Whisper model",
            )
        if options.translate:
            raise WorkloadError("Moonshine does not translate", next="take a multilingual Whisper")
        if options.language is not None:
            raise WorkloadError(
                "a Moonshine has the one language that it was trained on, and its folder does not say which",
                found=f"language {options.language}",
                next="leave the language out",
            )
        if options.prompt or options.temperature:
            asked = "a prompt" if options.prompt else f"temperature {options.temperature:g}"
            raise WorkloadError("Moonshine takes no prompt and decodes greedily", found=asked)

    def recognize(self, sound: Sound, options: Options) -> Iterator[Window]:
        windows = _windows(sound)
        while taken := list(islice(windows, options.batch)):
            reasons = [_reason(samples, options) for _, samples in taken]
            heard = [samples for (_, samples), reason in zip(taken, reasons, strict=True) if reason is None]
            found = iter(together([self.decode(samples) for samples in heard]))
            for (begin, samples), reason in zip(taken, reasons, strict=True):
                start, end = begin / RATE, (begin + len(samples)) / RATE
                segments, unheard = (), (Unheard(start=start, end=end, reason=reason or ""),)
                if reason is None:
                    segments, unheard = self._segments(*next(found), start, end), ()
                yield Window(
                    until=end, total=sound.seconds, segments=segments, language=None, unheard=unheard
                )

    def heard(self, samples: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.pad(samples, (0, max(0, LEAST - len(samples)))))[None]

    def begin(self, language: str | None) -> list[int]:
        return [self.start]

    def decode(self, samples: np.ndarray) -> Reading[tuple[list[int], float]]:
        """A window's tokens, the likeliest one each time, and the mean of their log-probabilities."""
        heard_1T = self.heard(samples)
        steps = self.model.steps(self.model.encode(heard_1T))
        most = min(self.positions - 1, math.ceil(TOKENS_PER_SECOND * heard_1T.shape[1] / RATE))
        tokens, total, token = list[int](), 0.0, self.start
        while len(tokens) < most:
            hidden_TE = yield steps, [token]
            logprobs_V = steps.logits(hidden_TE[-1]).log_softmax(-1)
            token = int(logprobs_V.argmax())
            total += float(logprobs_V[token])
            if token in self.ends:
                return tokens, total / (len(tokens) + 1)
            tokens.append(token)
        return tokens, total / len(tokens)

    def _segments(
        self, tokens: Sequence[int], mean_logprob: float, start: float, end: float
    ) -> tuple[Segment, ...]:
        """The window's text as one segment, none where it is empty."""
        text = self.tokenizer.decode(tokens).strip()
        found = Segment(start=start, end=end, text=text, tokens=tuple(tokens), mean_logprob=mean_logprob)
        return (found,) if text else ()


def _reason(samples: np.ndarray, options: Options) -> str | None:
    """Return why a window is not decoded."""
    if not samples.any():
        return "silence"
    voice = find_voice(samples) if options.only_speech else None
    return None if voice is None or voice.anywhere else voice.instead(0, len(samples) / RATE)


def _windows(sound: Sound) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each window's start and samples."""
    begin = 0
    while len(samples := sound.window(begin, LONGEST)):
        if len(samples) == LONGEST:
            samples = samples[: quietest(samples)]
        yield begin, samples
        begin += len(samples)
