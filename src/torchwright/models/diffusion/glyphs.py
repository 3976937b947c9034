"""Digits drawn from fonts: what the small trained pipeline of `scripts/train_glyphs.py` draws, and who reads them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from torchwright.core.errors import ModelError

SIDE = 32
"""Pixels of a picture."""
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FONTS = ("sans", "serif", "mono")
READER = Path("reader") / "model.safetensors"
"""Of the pipeline's folder; the pipeline itself has no such component and does not open it."""


def prompts() -> list[str]:
    """One for each digit in each font, digits fastest: "a serif seven"."""
    return [f"a {font} {digit}" for font in FONTS for digit in DIGITS]


def digit_of(prompt: str) -> int:
    """The digit that a prompt of `prompts` asks for."""
    return DIGITS.index(prompt.rpartition(" ")[2])


def make_reader() -> nn.Sequential:
    """Pictures (N, 1, 32, 32) from 0 to 1 → (N, 10): how much each digit is what is drawn."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(12, 24, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(24, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (SIDE // 8) ** 2, len(DIGITS)),
    )


def load_reader(folder: Path) -> nn.Module:
    """The classifier beside a pipeline of glyphs; raises `ModelError` where there is none."""
    from safetensors.torch import load_file

    if not (folder / READER).is_file():
        raise ModelError(
            f"{folder} has no classifier of glyphs",
            allowed=str(READER),
            next="write one with scripts/train_glyphs.py",
        )
    reader = make_reader()
    reader.load_state_dict(load_file(folder / READER))
    return reader.eval()


def read(reader: nn.Module, pictures_N3HW: torch.Tensor) -> list[int]:
    """The digit that is read off each picture."""
    with torch.no_grad():
        return reader(pictures_N3HW.float().mean(1, keepdim=True)).argmax(1).tolist()
