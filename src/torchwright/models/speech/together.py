"""Several decodings side by side: what all of them want to read next is read at once."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

import torch

from torchwright.models.speech.steps import Steps

Result = TypeVar("Result")
Reading = Generator[tuple[Steps, Sequence[int]], torch.Tensor, Result]
"""A decoding: it asks for tokens to be read, is given the decoder's output (T, E), and ends with its result."""


def together(readings: Sequence[Reading[Result]]) -> list[Result]:
    """Each one's result; each is given what it would be given alone."""
    found = dict[int, Result]()
    outputs = dict[int, torch.Tensor | None]((i, None) for i in range(len(readings)))
    while outputs:
        wanted = dict[int, tuple[Steps, Sequence[int]]]()
        for i, output_TE in outputs.items():
            try:
                wanted[i] = readings[i].send(output_TE)  # pyright: ignore[reportArgumentType] (None begins)
            except StopIteration as end:
                found[i] = end.value
        outputs = dict(zip(wanted, _read(list(wanted.values())), strict=True))
    return [found[i] for i in range(len(readings))]


def _read(pieces: list[tuple[Steps, Sequence[int]]]) -> list[torch.Tensor]:
    """Read pieces of one model as a batch."""
    return pieces[0][0].model.read(pieces) if pieces else []
