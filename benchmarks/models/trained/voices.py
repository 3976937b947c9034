"""Resemblyzer's voice encoder: whether two short pieces of speech have one speaker.

    pip install --no-deps resemblyzer; pip install librosa soundfile scipy
    apt-get download asterisk-core-sounds-{en,fr,it}-wav; for each: dpkg -x FILE.deb DATA

The metric is the area under the ROC curve of same-speaker scores over all pairs of pieces, 1.6 s each. Recordings of
announcements, a folder for each speaker; every second recording is held out.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models.trained.sounds import RATE, as_loud, joined, speakers, spectrogram
from benchmarks.models.trained.task import Inputs, Trained, answers, package_folder

FRAMES, MELS, SIZE, LAYERS = 160, 40, 256, 3
"""Resemblyzer's: frames of a piece (1.6 s), mel bands, width, LSTM layers."""
WINDOW, HOP = RATE * 25 // 1000, RATE // 100
BATCH, PIECES = 16, 48
"""Pieces of a call, and of a speaker in each half of the recordings."""


class VoiceEncoder(nn.Module):
    """Mel spectrograms (batch, frames, bands) → unit vectors; the layers of Resemblyzer's encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(MELS, SIZE, LAYERS, batch_first=True)
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, mels_BTM: torch.Tensor) -> torch.Tensor:
        states_BTE, _ = self.lstm(mels_BTM)
        return F.normalize(self.linear(states_BTE[:, -1]).relu(), dim=-1)


@dataclass
class SameSpeaker:
    """Area under the ROC curve: how often a pair of one speaker scores higher than a pair of two."""

    calls: list[Inputs]
    speaker: torch.Tensor
    __name__: str = field(default="area under the ROC curve of same-speaker scores")

    def __call__(self, model: nn.Module) -> float:
        vectors = answers(model, self.calls)
        first, second = torch.triu_indices(len(vectors), len(vectors), offset=1)
        scores = (vectors[first] * vectors[second]).sum(1)
        same = self.speaker[first] == self.speaker[second]
        order = torch.searchsorted(scores[~same].sort().values, scores[same])
        return (order.double() / (~same).sum()).mean().item()


def resemblyzer(sounds: Path) -> Trained:
    """Return the encoder with pieces of each speaker's recordings."""
    model = VoiceEncoder()
    weights = package_folder("resemblyzer") / "pretrained.pt"
    state = torch.load(weights, map_location="cpu", weights_only=True)["model_state"]
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    model.eval().requires_grad_(False)
    people = speakers(sounds)
    search, held_out = ([files[half::2] for files in people] for half in (0, 1))
    search_calls, search_speakers = calls(search)
    held_out_calls, held_out_speakers = calls(held_out)
    return Trained(
        model=model,
        search=search_calls,
        search_metric=SameSpeaker(search_calls, search_speakers),
        held_out=held_out_calls,
        held_out_metric=SameSpeaker(held_out_calls, held_out_speakers),
        higher_is_better=True,
        source=f"resemblyzer; {len(people)} speakers of asterisk-core-sounds",
    )


def calls(people: list[list[Path]]) -> tuple[list[Inputs], torch.Tensor]:
    """Return PIECES pieces of every speaker, mixed in calls of BATCH, and the speaker of each."""
    pieces = torch.cat([mels(joined(files, PIECES * FRAMES / 100)) for files in people])
    speaker = torch.arange(len(people)).repeat_interleave(PIECES)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
    return [(rows.contiguous(),) for rows in pieces[order].split(BATCH)], speaker[order]


def mels(sound: torch.Tensor) -> torch.Tensor:
    """Return the mel spectrograms (PIECES, FRAMES, MELS) of a sound cut into pieces."""
    librosa = importlib.import_module("librosa")
    bands = torch.from_numpy(librosa.filters.mel(sr=RATE, n_fft=WINDOW, n_mels=MELS))
    power = spectrogram(as_loud(sound), WINDOW, HOP)[: PIECES * FRAMES]
    return (power @ bands.T).view(PIECES, FRAMES, MELS)
