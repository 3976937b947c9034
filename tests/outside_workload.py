"""A workload of another package, as its author would write it: sound in, text out. Nothing in Torchwright knows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from torchwright.core.records import Quality
from torchwright.workloads import accuracy
from torchwright.workloads.base import Case, Optimized, Run, Workload, check_sizes

ALPHABET = "-abcdefghijklmnopqrstuvwxyz "
"""The first stands for silence."""
FRAME = 16
"""Samples that one letter takes."""
RATE = 8000


class Letters(nn.Module):
    """forward(sounds_BS) → logits (B, T, V), one for each frame and letter."""

    def __init__(self) -> None:
        super().__init__()
        self.hear = nn.Conv1d(1, 32, FRAME, stride=FRAME)
        self.spell = nn.Linear(32, len(ALPHABET))

    def forward(self, sounds_BS: torch.Tensor) -> torch.Tensor:
        return self.spell(self.hear(sounds_BS[:, None]).transpose(1, 2).tanh())


class Speech(Workload):
    """Letters heard in sounds of one length."""

    name = "letters"
    supports = "Letters"

    def __init__(self, folder: Path, *, batch: int = 2, samples: int = 160) -> None:
        self.folder, self.batch, self.samples = folder, batch, samples

    @classmethod
    def accepts(cls, folder: Path, config: dict[str, Any]) -> bool:
        return config.get("architectures") == ["Letters"]

    def build(self) -> nn.Module:
        model = Letters()
        model.load_state_dict(load_file(self.folder / "model.safetensors"))
        return model.eval().requires_grad_(False)

    def cases(self, dtype: torch.dtype) -> list[Case]:
        return [Case(name="listen", args=(self._sounds(0),))]

    def observe(self, run: Run, dtype: torch.dtype) -> list[torch.Tensor]:
        return [run(Case(name="listen", args=(self._sounds(index),))).float().cpu() for index in range(4)]

    def compare(self, reference: Any, candidate: Any) -> Quality:
        return accuracy.relative_error(reference, candidate)

    def files(self, *, weights: bool) -> dict[str, Path]:
        names = ["config.json", *(["model.safetensors"] if weights else [])]
        return {name: self.folder / name for name in names}

    def describe(self) -> dict[str, Any]:
        return {"kind": self.name, "model": self.label, "batch": self.batch, "samples": self.samples}

    @classmethod
    def check(cls, description: dict[str, Any]) -> None:
        check_sizes(description, "batch", "samples")

    @classmethod
    def answerer(cls, optimized: Optimized) -> Transcriber:
        return Transcriber(optimized)

    @classmethod
    def rates(cls, description: dict[str, Any], seconds: dict[str, float]) -> dict[str, float]:
        return {"sound_s_per_s": description["batch"] * description["samples"] / RATE / seconds["listen"]}

    def _sounds(self, index: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(index)
        return torch.randn(self.batch, self.samples, generator=random).to(self.device)


class Transcriber:
    """What the user of an artifact calls."""

    def __init__(self, optimized: Optimized) -> None:
        self._run, self._shape = (
            optimized.run,
            (optimized.description["batch"], optimized.description["samples"]),
        )

    def transcribe(self, sound_S: torch.Tensor) -> str:
        """The letters of one sound, silence left out."""
        sounds_BS = torch.zeros(self._shape)
        sounds_BS[0, : len(sound_S)] = sound_S
        best_T = self._run(Case(name="listen", args=(sounds_BS,)))[0].argmax(-1).tolist()
        return "".join(ALPHABET[index] for index in best_T).replace(ALPHABET[0], "")


class Forgetful(Speech):
    """Does not say which model it is for."""

    def describe(self) -> dict[str, Any]:
        return {"kind": self.name, "batch": self.batch}


class Unfair(Speech):
    """Fails to compare."""

    def compare(self, reference: Any, candidate: Any) -> Quality:
        return accuracy.relative_error(reference, candidate["logits"])


class Broken(Speech):
    """Fails while it is made."""

    def __init__(self, folder: Path) -> None:
        raise KeyError("alphabet")


class Unnamed(Speech):
    """Has its name where it is read too late."""

    name = None  # type: ignore[assignment]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.name = "letters"  # type: ignore[misc]


def save(folder: Path) -> Path:
    """A model folder with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    save_file(Letters().state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["Letters"]}))
    return folder
