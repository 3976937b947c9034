"""Silero VAD, which tells speech from pauses and noise.

    pip install --no-deps silero-vad; pip install soundfile scipy
    apt-get download asterisk-core-sounds-{en,fr,it}-wav; for each: dpkg -x FILE.deb DATA

Announcements with pauses between them and pink noise over all. A window of 32 ms is speech if the announcement alone
is loud there. The metric is the F1 of these windows; every second recording is held out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models.trained.sounds import RATE, as_loud, pink_noise, read, speakers
from benchmarks.models.trained.task import Inputs, Trained, answers, package_folder

WINDOW, CONTEXT = 512, 64
"""Samples of a window, and of the sound before it that is seen as well."""
FFT, HOP = 256, 128
WINDOWS, BATCH = 125, 16
"""Windows of a piece (4 s), and pieces of a call."""
SEARCH_CALLS, HELD_OUT_CALLS = 4, 8
PAUSE = (0.2, 1.2)
"""Seconds of silence before an announcement, from and to."""
NOISE_DB = (0.0, 15.0)
"""Speech over noise in decibels, from and to."""
LOUD, SURE = 0.1, 0.5
"""Loudness of a window of speech in parts of the announcement's, and the probability that counts as speech."""


class SileroVad(nn.Module):
    """Sound (batch, CONTEXT + windows × WINDOW) → probability of speech in each window; the layers of Silero VAD."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, FFT + 2, FFT, HOP, bias=False)
        self.conv1 = nn.Conv1d(FFT // 2 + 1, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, 2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, 2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm = nn.LSTM(128, 128, batch_first=True)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, sound_BS: torch.Tensor) -> torch.Tensor:
        windows_BTS = sound_BS.unfold(1, CONTEXT + WINDOW, WINDOW)
        batch, count, size = windows_BTS.shape
        padded = F.pad(windows_BTS.reshape(batch * count, 1, size), (0, CONTEXT), mode="reflect")
        real, imaginary = self.stft_conv(padded).chunk(2, 1)
        states = (real.square() + imaginary.square()).sqrt()
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
            states = layer(states).relu()
        states_BTE, _ = self.lstm(states.view(batch, count, -1))
        return self.final_conv(states_BTE.relu().transpose(1, 2)).sigmoid().squeeze(1)


@dataclass
class SpeechF1:
    """F1 of the windows that are speech."""

    calls: list[Inputs]
    speech: torch.Tensor
    """True where a window is speech: (pieces, windows)."""
    __name__: str = field(default="F1 of speech")

    def __call__(self, model: nn.Module) -> float:
        found = answers(model, self.calls) >= SURE
        right = (found & self.speech).sum()
        return (2 * right / (found.sum() + self.speech.sum())).item()


def silero_vad(sounds: Path) -> Trained:
    """Return the detector of 16 kHz with noisy announcements of every speaker."""
    model = load()
    people = speakers(sounds)
    search, search_speech = calls([files[::2] for files in people], SEARCH_CALLS, seed=0)
    held_out, held_out_speech = calls([files[1::2] for files in people], HELD_OUT_CALLS, seed=1)
    return Trained(
        model=model,
        search=search,
        search_metric=SpeechF1(search, search_speech),
        held_out=held_out,
        held_out_metric=SpeechF1(held_out, held_out_speech),
        higher_is_better=True,
        source=f"silero-vad; {len(people)} speakers of asterisk-core-sounds",
    )


def load() -> SileroVad:
    """Return the layers with the weights of the package's TorchScript; its safetensors are an older version's."""
    file = package_folder("silero_vad", "silero-vad") / "data" / "silero_vad.jit"
    state = torch.jit.load(file, map_location="cpu").state_dict()
    names = {"stft_conv.weight": "stft.forward_basis_buffer"}
    for kind in ("weight", "bias"):
        names |= {f"conv{place + 1}.{kind}": f"encoder.{place}.reparam_conv.{kind}" for place in range(4)}
        names |= {f"lstm.{kind}_{side}_l0": f"decoder.rnn.{kind}_{side}" for side in ("ih", "hh")}
        names[f"final_conv.{kind}"] = f"decoder.decoder.2.{kind}"
    model = SileroVad()
    model.load_state_dict({ours: state[f"_model.{theirs}"] for ours, theirs in names.items()})
    return model.eval().requires_grad_(False)


def calls(people: list[list[Path]], count: int, *, seed: int) -> tuple[list[Inputs], torch.Tensor]:
    """Return calls of pieces, the speakers mixed, and which windows are speech."""
    draw = torch.Generator().manual_seed(seed)
    pieces = -(-count * BATCH // len(people))
    made = [piece for files in people for piece in noisy(files, pieces, draw)]
    order = torch.randperm(len(made), generator=draw)[: count * BATCH].tolist()
    sound = torch.stack([made[place][0] for place in order])
    speech = torch.stack([made[place][1] for place in order])
    return [(rows.contiguous(),) for rows in sound.split(BATCH)], speech


def noisy(files: list[Path], pieces: int, draw: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pieces of these announcements with pauses and noise, and which of their windows are speech."""
    length, parts = pieces * WINDOWS * WINDOW, list[torch.Tensor]()
    place = 0
    while sum(map(len, parts)) < length + WINDOW:
        sound = as_loud(read(files[place % len(files)]))
        low, high = PAUSE
        pause = int((low + (high - low) * torch.rand((), generator=draw).item()) * RATE)
        parts += [torch.zeros(pause), sound]
        place += 1
    clean = torch.cat(parts)[:length].view(pieces, WINDOWS, WINDOW)
    loud = clean.square().mean(-1).sqrt() > LOUD * 0.1
    low, high = NOISE_DB
    below = low + (high - low) * torch.rand(pieces, 1, generator=draw)
    noise = pink_noise(pieces, WINDOWS * WINDOW, draw) * 0.1 * 10 ** (-below / 20)
    return list(zip(F.pad(clean.flatten(1) + noise, (CONTEXT, 0)), loud, strict=True))
