"""Recordings that Debian packages bring along, unpacked in a folder: `dpkg -x PACKAGE.deb DATA`."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.models.trained.task import MissingPackage

RATE = 16_000
READ_ALOUD = "usr/share/pocketsphinx/test/data"
"""Books and playing cards (LibriVox, CMU Sphinx), of `pocketsphinx-testdata`."""
ANNOUNCED = "usr/share/asterisk/sounds"
"""A folder for each speaker of `asterisk-core-sounds-LANGUAGE-wav`, of a telephone's quality."""


def read_aloud(sounds: Path) -> list[Path]:
    """Return the recordings of books and cards."""
    found = sorted((sounds / READ_ALOUD).glob("*/*.wav"))
    if len(found) < 2:
        raise MissingPackage(
            f"{sounds / READ_ALOUD} has no recordings; unpack Debian's pocketsphinx-testdata there"
        )
    return found


def speakers(sounds: Path) -> list[list[Path]]:
    """Return the recordings of each speaker."""
    folders = sorted(folder for folder in (sounds / ANNOUNCED).glob("*") if folder.is_dir())
    if len(folders) < 2:
        raise MissingPackage(
            f"{sounds / ANNOUNCED} has fewer than two speakers; unpack two or more of Debian's "
            "asterisk-core-sounds-en-wav, -es-wav, -fr-wav, -it-wav and -ru-wav there"
        )
    return [sorted(folder.rglob("*.wav")) for folder in folders]


def read(file: Path) -> torch.Tensor:
    """Return a recording at 16 kHz, one channel."""
    import soundfile
    from scipy.signal import resample_poly

    samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
    mono = samples.mean(1)
    return torch.from_numpy(mono if rate == RATE else resample_poly(mono, RATE, rate).astype("float32"))


def joined(files: list[Path], seconds: float) -> torch.Tensor:
    """Return recordings one after another, as many as last so long, cut at the end."""
    length, parts = int(seconds * RATE), list[torch.Tensor]()
    for file in itertools.cycle(files):
        parts.append(read(file))
        if sum(map(len, parts)) >= length:
            return torch.cat(parts)[:length]
    raise MissingPackage("no recordings")


def as_loud(sound: torch.Tensor) -> torch.Tensor:
    """Return the sound with a root mean square of 0.1."""
    return 0.1 * sound / sound.square().mean().sqrt().clamp_min(1e-9)


def pink_noise(rows: int, samples: int, draw: torch.Generator) -> torch.Tensor:
    """Return noise (rows, samples) of as much power in every octave, with a root mean square of 1."""
    spectrum = torch.fft.rfft(torch.randn(rows, samples, generator=draw))
    spectrum[:, 1:] /= torch.arange(1, spectrum.shape[1]).sqrt()
    noise = torch.fft.irfft(spectrum, samples)
    return noise / noise.square().mean(1, keepdim=True).sqrt()


def spectrogram(sound: torch.Tensor, window: int, hop: int) -> torch.Tensor:
    """Return the power spectrum (frames, frequencies) by Hann windows around each hop."""
    padded = F.pad(sound, (window // 2, window // 2))
    frames = padded.unfold(0, window, hop) * torch.hann_window(window)
    return torch.fft.rfft(frames).abs().square()
