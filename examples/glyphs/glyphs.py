"""Digits drawn from fonts: the prompts of the small pipeline that `train_glyphs.py` trains, and the classifier of its
pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchwright.core.errors import ModelError

SIDE = 32
"""Pixels of a picture."""
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FONTS = ("sans", "serif", "mono")
READER = Path("reader") / "model.safetensors"
"""A file of the pipeline's folder; the pipeline itself has no such component and does not open it."""


def prompts() -> list[str]:
    """Return one for each digit in each font, digits fastest: "a serif seven"."""
    return [f"a {font} {digit}" for font in FONTS for digit in DIGITS]


def digit_of(prompt: str) -> int:
    """Return the digit that a prompt of `prompts` asks for."""
    return DIGITS.index(prompt.rpartition(" ")[2])


def make_reader() -> nn.Sequential:
    """Return a classifier: pictures (N, 1, 32, 32) from 0 to 1 → scores of the digits (N, 10)."""
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
    """Return the classifier next to a pipeline of glyphs; raises `ModelError` where there is none."""
    from safetensors.torch import load_file

    if not (folder / READER).is_file():
        raise ModelError(
            f"{folder} has no classifier of glyphs",
            allowed=str(READER),
            next="write one with examples/glyphs/train_glyphs.py",
        )
    reader = make_reader()
    reader.load_state_dict(load_file(folder / READER))
    return reader.eval()


def read(reader: nn.Module, pictures_N3HW: torch.Tensor) -> list[int]:
    """Return the digit that the classifier reads in each picture."""
    with torch.no_grad():
        return reader(pictures_N3HW.float().mean(1, keepdim=True)).argmax(1).tolist()


def tokenizer(words: Sequence[str]) -> Any:
    """Return a tokenizer of these words, with T5's end of text and padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(("<pad>", "</s>", "<unk>", *words))}
    found = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    )
