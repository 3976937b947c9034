"""Log-mel features, as Whisper was trained on them; bit-equal to transformers' feature extractor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from torchwright.core.errors import ModelError
from torchwright.hub.fields import Fields
from torchwright.hub.folder import find_object
from torchwright.models.speech.sound import RATE

HOP = 160
"""Samples between frames: 10 ms."""
FFT = 400
FLOOR, RANGE, SHIFT = 1e-10, 8.0, 4.0
"""Power below the floor is none; 80 dB below the loudest place is silence; the rest lies around 0."""
PREPROCESSOR = "preprocessor_config.json"


class LogMel:
    """Features (1, M, frames) of a window of samples, silence behind them; `bands` and `frames` are the model's.

    Raises `ModelError` for a folder whose features are made in another way.
    """

    def __init__(self, folder: Path, *, bands: int, frames: int) -> None:
        from transformers.audio_utils import mel_filter_bank

        path = folder / PREPROCESSOR
        fields = Fields(path, find_object(path))
        allowed = {"feature_size": bands, "n_fft": FFT, "hop_length": HOP, "sampling_rate": RATE}
        for key, value in allowed.items():
            if fields.integer(key, value) != value:
                raise fields.wrong(key, str(value))
        if fields.number("dither", 0.0):
            raise ModelError(
                f"{path} asks for dither, which makes answers differ from run to run", allowed="0"
            )
        self.frames = frames
        self._window = torch.hann_window(FFT)
        filters_FM = mel_filter_bank(
            num_frequency_bins=1 + FFT // 2,
            num_mel_filters=bands,
            min_frequency=0.0,
            max_frequency=RATE / 2,
            sampling_rate=RATE,
            norm="slaney",
            mel_scale="slaney",
        )
        self._filters_MF = torch.from_numpy(filters_FM).float().T

    def __call__(self, samples: np.ndarray) -> torch.Tensor:
        padded = torch.zeros(1, self.frames * HOP)
        padded[0, : len(samples)] = torch.from_numpy(samples)
        spectrum = torch.stft(padded, FFT, HOP, window=self._window, return_complex=True)
        power_1FT = (spectrum[..., :-1].abs() ** 2).contiguous()
        log_1MT = (self._filters_MF @ power_1FT).clamp(min=FLOOR).log10()
        log_1MT = torch.maximum(log_1MT, log_1MT.max() - RANGE)
        return (log_1MT + SHIFT) / SHIFT
