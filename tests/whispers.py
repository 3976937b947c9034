"""Tiny Whisper folders with random weights, sounds for them, and transformers' features cut to windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.generation.configuration_utils import GenerationConfig

SECONDS = 4
"""Of a tiny model's window."""
TICKS = SECONDS * 50
LANGUAGES = ("en", "de", "fr")
NAMES = (
    *("endoftext", "startoftranscript"),
    *LANGUAGES,
    *("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"),
)


def tokenizer(names: tuple[str, ...] = NAMES) -> Any:
    """A token a byte, then the special ones in Whisper's order, then a timestamp for each tick."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made: Any = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([f"<|{name}|>" for name in names])
    made.add_tokens([f"<|{tick * 0.02:.2f}|>" for tick in range(TICKS + 1)])
    return made


def tiny(folder: Path, *, languages: bool = True, peaks: float = 20, **overrides: Any) -> Path:
    """A multilingual Whisper of two layers over windows of four seconds, or an English one.

    The larger `peaks`, the longer is its text between timestamps.
    """
    made = tokenizer(NAMES if languages else tuple(name for name in NAMES if name not in LANGUAGES))
    ids = {name: made.token_to_id(f"<|{name}|>") for name in NAMES}
    fields: dict[str, Any] = {
        "vocab_size": made.get_vocab_size(),
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_mel_bins": 80,
        "max_source_positions": TICKS,
        "max_target_positions": 64,
        "pad_token_id": ids["endoftext"],
        "bos_token_id": ids["endoftext"],
        "eos_token_id": ids["endoftext"],
        "decoder_start_token_id": ids["startoftranscript"],
    }
    model = WhisperForConditionalGeneration(WhisperConfig(**(fields | overrides))).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed_positions" not in name:
            parameter.data.mul_(peaks if "embed" in name else 4)  # the default makes all logits nearly alike
    blank = [
        token for token in range(256) if not made.decode([token]).strip()
    ]  # segments of these are no text
    special = range(ids["endoftext"] + 1, ids["notimestamps"] + 1)
    settings: Any = GenerationConfig(
        max_length=fields["max_target_positions"],
        suppress_tokens=[*blank, *special],
        begin_suppress_tokens=[7, ids["endoftext"]],
        no_timestamps_token_id=ids["notimestamps"],
        max_initial_timestamp_index=50,
        prev_sot_token_id=ids["startofprev"],
        is_multilingual=languages,
        alignment_heads=[[0, 1], [1, 0]],
        **{key: fields[key] for key in ("pad_token_id", "eos_token_id", "decoder_start_token_id")},
    )
    if languages:
        settings.lang_to_id = {f"<|{code}|>": ids[code] for code in LANGUAGES}
        settings.task_to_id = {name: ids[name] for name in ("transcribe", "translate")}
    model.generation_config = settings
    model.save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))
    transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=SECONDS).save_pretrained(folder)
    return folder


def noise(seconds: float) -> np.ndarray:
    """Fresh noise that swells and falls, so that windows differ."""
    count = round(seconds * 16_000)
    swell = np.random.rand(count // 4_000 + 1).repeat(4_000)[:count]
    return (0.2 * swell * np.random.randn(count)).astype(np.float32)


class WholeFeatures:
    """Stands for a model's features where they are transformers' of the whole sound: those of a window are cut out."""

    def __init__(self, samples: np.ndarray, whole_1MT: torch.Tensor, frames: int) -> None:
        self._samples, self._whole_1MT, self.frames = samples, whole_1MT, frames

    def __call__(self, window: np.ndarray) -> torch.Tensor:
        places = np.flatnonzero(self._samples == window[0])
        frame = next(int(i) for i in places if (self._samples[i : i + 9] == window[:9]).all()) // 160
        cut = self._whole_1MT[..., frame : frame + min(self.frames, len(window) // 160)]
        return torch.nn.functional.pad(cut, (0, self.frames - cut.shape[-1]))
