"""Made-up sounds: something between a voice and noise, the same for equal seeds."""

from __future__ import annotations

import math

import torch

from torchwright.workloads.pictures import picture

RATE = 16_000
"""Samples a second, which speech models of transformers agree on."""


def wave(seed: int, seconds: float) -> torch.Tensor:
    """A sound (samples,) in float32, mean 0, deviation 1: eight harmonics of a drifting pitch, swelling, in noise."""
    random = torch.Generator().manual_seed(seed)
    time_T = torch.arange(int(seconds * RATE)) / RATE
    base, drift, pace, loud = torch.rand(4, generator=random).tolist()
    pitch_T = 90 + 160 * base + 30 * torch.sin(2 * math.pi * (0.3 + drift) * time_T)
    phase_T = 2 * math.pi * torch.cumsum(pitch_T, 0) / RATE
    strength_8 = torch.rand(8, generator=random) / torch.arange(1, 9)
    voice_T = (strength_8[:, None] * torch.sin(torch.arange(1, 9)[:, None] * phase_T)).sum(0)
    envelope_T = 0.5 + 0.5 * torch.sin(2 * math.pi * (1 + 3 * pace) * time_T)
    sound_T = voice_T * envelope_T + (0.05 + 0.1 * loud) * torch.randn(len(time_T), generator=random)
    return (sound_T - sound_T.mean()) / sound_T.std()


def spectrogram(seed: int, bands: int, frames: int) -> torch.Tensor:
    """Log-mel features (bands, frames) in float32 from -1 to 1: smooth in time and frequency, with edges."""
    return picture(seed, (1, bands, frames))[0] * 2 - 1
