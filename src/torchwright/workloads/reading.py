"""The batches that an architecture of transformers reads: text, pictures, sound, or two of them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import ModelError
from torchwright.workloads import sounds
from torchwright.workloads.encoder import pad_token, text_limit
from torchwright.workloads.pictures import Pictures
from torchwright.workloads.sentences import Sentences

SEED_OF_CALIBRATION = 1_000_000
SECONDS = 4.0
POSITIONS_PER_SECOND, FRAMES_PER_POSITION = 50, 2
"""The downsampling of speech models: 320 samples a position in wav2vec 2.0, and Whisper's frames."""
SOUNDS = ("input_values", "input_features")


class BatchReader:
    """Builds batches for the transformers class `model`, as its `forward` takes them; equal indices give equal
    batches.

    Sentences are padded to the longest. The decoder of an encoder-decoder reads the sentences, shifted by one token.
    A model of two towers (CLIP) reads as many pictures as sentences.

    Raises `ModelError` for an architecture with other inputs, or if a folder lacks a required setting.
    """

    def __init__(
        self, folder: Path, config: dict[str, Any], model: type, *, batch: int, tokens: int, text: Path | None
    ) -> None:
        main: str = model.main_input_name
        two = hasattr(model, "get_text_features") and hasattr(model, "get_image_features")
        self.batch, self.tokens = batch, tokens
        takes = inspect.signature(model.forward).parameters
        self.decodes = "decoder_input_ids" in takes
        # As its tokenizer does: models of one segment have the argument, too, and nobody gives it to them.
        self.segments = "token_type_ids" in takes and config.get("type_vocab_size", 0) > 1
        self.start = int(config.get("decoder_start_token_id") or 0)
        self.reads_text = two or main == "input_ids"
        self.pictures, self.sound, self.sentences = None, "", None
        if two or main == "pixel_values":
            self.pictures = Pictures(folder, config | config.get("vision_config", {}), batch)
        elif main in SOUNDS:
            self.sound, self.shape = main, _shape(config, main, model)
        elif main != "input_ids":
            raise _unknown(model, main)
        if self.reads_text or self.decodes:
            of_text = config | config.get("text_config", {})
            self.limit, self.pad = text_limit(folder, of_text), pad_token(of_text)
            self.tokens = min(tokens, self.limit or tokens)
            self.sentences = Sentences(text, folder, batch=batch, tokens=self.tokens, pad=self.pad)

    @property
    def positions(self) -> float:
        """Return the number of positions that one row counts as in an estimate of operations."""
        return (
            (self.pictures.patches if self.pictures else 0.0)
            + (self._sound_positions if self.sound else 0.0)
            + (self.tokens if self.sentences else 0.0)
        )

    @property
    def batches(self) -> int | None:
        """Batches for the metric's sample; None where they are made up and never end."""
        return None if self.sentences is None else self.sentences.batches

    def inputs(self, index: int, *, calibration: bool = False) -> dict[str, torch.Tensor]:
        """Batch `index` of the sample, or of what is kept for calibration: name → tensor of `batch` rows."""
        made = index + SEED_OF_CALIBRATION // self.batch if calibration else index
        inputs: dict[str, torch.Tensor] = {}
        if self.pictures is not None:
            inputs["pixel_values"] = self.pictures.images(made)
        if self.sound:
            seeds = range(made * self.batch, (made + 1) * self.batch)
            inputs[self.sound] = torch.stack([self._sound(seed) for seed in seeds])
        if self.sentences is not None:
            ids_BT, mask_BT = self.sentences.batch(index, calibration=calibration)
            if self.reads_text:
                inputs |= {"input_ids": ids_BT, "attention_mask": mask_BT}
            if self.segments:
                inputs["token_type_ids"] = torch.zeros_like(ids_BT)
            if self.decodes:
                first_B1 = torch.full_like(ids_BT[:, :1], self.start)
                inputs["decoder_input_ids"] = torch.cat([first_B1, ids_BT[:, :-1]], 1)
        return inputs

    @property
    def _sound_positions(self) -> float:
        return SECONDS * POSITIONS_PER_SECOND if self.shape is None else self.shape[1] / FRAMES_PER_POSITION

    def _sound(self, seed: int) -> torch.Tensor:
        if self.shape is None:
            return sounds.wave(seed, SECONDS)
        return sounds.spectrogram(seed, *self.shape)


def _shape(config: dict[str, Any], main: str, model: type) -> tuple[int, int] | None:
    """(bands, frames) of a spectrogram, or None for a wave."""
    if main == "input_values" and "conv_stride" in config:
        return None
    if main == "input_features" and {"num_mel_bins", "max_source_positions"} <= config.keys():
        return int(config["num_mel_bins"]), FRAMES_PER_POSITION * int(config["max_source_positions"])
    raise _unknown(model, main)


def _unknown(model: type, main: str) -> ModelError:
    return ModelError(
        f"it is not known what {model.__name__} reads",
        found=main,
        allowed="text, pictures of a known size, sound as a wave or as Whisper's features",
        next="give it as package.module:factory, which returns the model and example inputs",
    )
