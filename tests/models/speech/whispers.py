"""Tiny Whisper folders with random weights, sounds for them, and transformers' features cut to windows."""

from __future__ import annotations

import numpy as np
import torch

from torchwright.testing.whispers import LANGUAGES as LANGUAGES
from torchwright.testing.whispers import NAMES as NAMES
from torchwright.testing.whispers import SECONDS as SECONDS
from torchwright.testing.whispers import TICKS as TICKS
from torchwright.testing.whispers import tiny as tiny
from torchwright.testing.whispers import tokenizer as tokenizer


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
