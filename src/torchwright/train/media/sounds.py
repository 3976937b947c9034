"""Sounds and their words to what a Whisper of transformers takes: log-mel features, and tokens to be foretold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from torchwright.core.errors import ModelError, UnknownName, WorkloadError
from torchwright.hub.fields import Fields
from torchwright.hub.folder import read_config
from torchwright.hub.tokenizer import open_tokenizer
from torchwright.models.speech.languages import language_code
from torchwright.models.speech.sound import RATE, opened
from torchwright.models.speech.whisper.features import HOP, LogMel
from torchwright.models.speech.whisper.pieces import FRAMES_PER_TICK
from torchwright.models.speech.whisper.vocabulary import TICK_SECONDS, read_vocabulary
from torchwright.train.media.config import SpeechData, SpeechRun
from torchwright.train.media.listing import Item, Listing, hold_out, list_sounds
from torchwright.train.media.samples import MediaBatch
from torchwright.train.model.vocabulary import IGNORE

FAMILY = "whisper"


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """A run's data, listed."""

    train: Listing
    validation: Listing


class SpeechTask:
    """Files to features and tokens."""

    def __init__(self, model: Path, data: SpeechData) -> None:
        """Raises `ModelError` for a folder without a Whisper model."""
        config = Fields(model / "config.json", read_config(model))
        if (family := config.data.get("model_type")) != FAMILY:
            raise ModelError(
                f"{model} is no speech recognizer that is trained here", found=str(family), allowed=FAMILY
            )
        self.data, self.tokenizer = data, open_tokenizer(model)
        self.vocabulary = read_vocabulary(model, self.tokenizer)
        self.longest = config.integer("max_target_positions", 448)
        positions = config.integer("max_source_positions", 1500)
        bands = config.integer("num_mel_bins", 80)
        self.features = LogMel(model, bands=bands, frames=positions * FRAMES_PER_TICK)
        self.window = self.features.frames * HOP

    def prepare(self, item: Item, draw: int | None) -> tuple[torch.Tensor, list[int]]:
        """Features (M, F) and tokens. Raises `WorkloadError` for a file or a text that does not fit into a window."""
        with opened(item.path) as sound:
            samples = sound.window(0, self.window + 1)
        if not 0 < len(samples) <= self.window:
            raise WorkloadError(
                f"{item.path.name} does not fit into a window",
                found="no samples" if not len(samples) else f"more than {self.window / RATE:g} s",
                allowed=f"up to {self.window / RATE:g} s",
                next="cut it into pieces with their own texts",
            )
        return self.features(samples)[0], self.tokens(str(item.target), len(samples), item.language)

    def tokens(self, text: str, samples: int, language: str | None) -> list[int]:
        """Return the prompt, the text between its times, and the end.

        Raises `WorkloadError` for an unknown language.
        """
        known = self.vocabulary
        try:
            spoken = language_code(language or self.data.language, known.languages or ["en"])
        except UnknownName as error:
            raise WorkloadError(str(error)) from error
        words = self.tokenizer.encode(f" {text.strip()}", add_special_tokens=False).ids
        if any(token >= known.end for token in words):
            raise WorkloadError("the text holds a special token of the tokenizer", found=text[:80])
        body = [known.no_timestamps, *words]
        if self.data.timestamps:
            last = min(known.size - 1, known.first_tick + round(samples / RATE / TICK_SECONDS))
            body = [known.first_tick, *words, last]
        found = [*known.prompt(spoken, "transcribe"), *body, known.end]
        if len(found) > self.longest:
            raise WorkloadError(
                "the text is too long for a window",
                found=f"{len(found)} tokens",
                allowed=f"{self.longest} tokens",
            )
        return found

    def collate(self, samples: Sequence[tuple[torch.Tensor, list[int]] | None]) -> MediaBatch:
        """Teacher forcing: each token is foretold from those before it; the first is given."""
        filler = next((sample for sample in samples if sample), None)
        if filler is None:
            filler = self.features(np.zeros(1, np.float32))[0], [self.vocabulary.start, self.vocabulary.end]
        filled = [sample or filler for sample in samples]
        longest = max(len(ids) for _, ids in filled)
        ids_BT = torch.full((len(filled), longest), self.vocabulary.end)
        labels_BT = torch.full((len(filled), longest), IGNORE)
        for row, (sample, (_, ids)) in enumerate(zip(samples, filled, strict=True)):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
            if sample is not None:
                labels_BT[row, : len(ids)] = ids_BT[row, : len(ids)]
        return MediaBatch(
            inputs={
                "input_features": torch.stack([features_MF for features_MF, _ in filled]),
                "decoder_input_ids": ids_BT[:, :-1],
                "use_cache": False,
            },
            labels=labels_BT[:, 1:],
        )


def list_spoken(run: SpeechRun, folder: Path, *, strict: bool | None = None) -> Spoken:
    """Raises `DataError` as `list_sounds`."""
    data = run.data if strict is None else run.data.model_copy(update={"strict": strict})
    train, held_out = hold_out(list_sounds(data.train, data, folder), data.hold_out, data.seed)
    if data.validation:
        held_out = list_sounds(data.validation, data, folder)
    return Spoken(train=train, validation=held_out)
