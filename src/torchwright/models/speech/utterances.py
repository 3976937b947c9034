"""Evaluation data of a speech model: recordings with references, or synthetic sounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchwright.core.errors import WorkloadError
from torchwright.models.speech.sound import RATE, opened
from torchwright.workloads.sounds import wave
from torchwright.workloads.texts import read_texts

LOUDNESS = 0.1
"""Standard deviation of synthetic sound."""
CHARACTERS = 16
"""Characters of text per requested token; no speech tokenizer needs nearly as many."""
LONGEST_REFERENCE = 2**20
"""Bytes."""


@dataclass(frozen=True, kw_only=True)
class Recordings:
    """Sound files in their order, each with its words, or none with any."""

    audio: tuple[Path, ...] = ()
    references: tuple[str, ...] = ()

    @classmethod
    def of(cls, audio: Any, reference: Any) -> Recordings:
        """Build from the options of a workload, each a path or a list of paths.

        Raises `WorkloadError` for missing files, for references without sound or in another number, and for a reference
        that is not text.
        """
        sounds, texts = _paths("--audio", audio), _paths("--reference", reference)
        if texts and len(texts) != len(sounds):
            raise WorkloadError(
                f"{len(texts)} references for {len(sounds)} sound files",
                allowed="one text file for each, in the same order, or none at all",
            )
        return cls(audio=sounds, references=tuple(map(_text, texts)))


def _paths(option: str, value: Any) -> tuple[Path, ...]:
    names = [value] if isinstance(value, str | Path) else list(value or ())
    if not all(isinstance(name, str | Path) for name in names):
        raise WorkloadError(f"{option} {str(names)[:100]}", allowed="names of files")
    paths = tuple(Path(name).absolute() for name in names)
    for path in paths:
        if not path.is_file():
            raise WorkloadError(f"{option} {path}: there is no such file")
    return paths


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > LONGEST_REFERENCE:
            raise ValueError(f"more than {LONGEST_REFERENCE:,} bytes")
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise WorkloadError(f"--reference {path} cannot be read", found=str(error)) from error
    if not text.split():
        raise WorkloadError(f"--reference {path} has no words")
    return " ".join(text.split())


def first_window(path: Path, window: int) -> np.ndarray:
    """A file's samples, as many as one window has; raises `SoundError`."""
    with opened(path) as sound:
        return sound.window(0, window)


def made_up(seed: int, samples: int) -> np.ndarray:
    """Samples (T,) in float32, the same for equal seeds."""
    return (LOUDNESS * wave(seed, samples / RATE)[:samples]).numpy()


def some_text(tokenizer: Any, index: int, count: int) -> list[int]:
    """`count` tokens of the bundled text, other ones for each index, from its beginning again after its end."""
    text, length = read_texts(None).evaluation, CHARACTERS * count
    begin = index * length % max(1, len(text) - length)
    return tokenizer.encode(text[begin : begin + length], add_special_tokens=False).ids[:count]
