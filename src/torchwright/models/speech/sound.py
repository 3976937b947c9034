# pyright: reportMissingImports=false
"""Mono samples at 16 kHz, read forward in windows, so that an hour of sound takes the memory of one window."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from torchwright.models.speech.files import decoded, need
from torchwright.models.speech.sound_error import SoundError

RATE = 16_000
"""Samples a second, which Whisper and Moonshine agree on."""
BLOCK = 5 * RATE
"""Samples that are taken at once."""
LOUDEST = 1_000.0
"""Largest sample at a full scale of 1: larger ones are unscaled integers, whose squares overflow."""


class Sound:
    """Mono float32 samples at 16 kHz, read forward: what lies before the last window is let go.

    `blocks` are the samples in order; `seconds` is how long they are where that is known before they are read.
    `notices` say what the user should know of the source; the list may grow while blocks are read.
    With `until_fault` a sound that cannot be read to its end ends there, and `fault` says why.
    """

    def __init__(
        self,
        name: str,
        blocks: Iterable[np.ndarray],
        seconds: float | None,
        notices: Sequence[str] = (),
        *,
        until_fault: bool = False,
    ) -> None:
        self.name, self.seconds, self.notices = name, seconds, notices
        self.fault: SoundError | None = None
        self._until_fault = until_fault
        self._blocks = iter(blocks)
        self._held = np.empty(0, np.float32)
        self._first = 0
        self._ended = False

    def window(self, start: int, count: int) -> np.ndarray:
        """Samples (at most `count`) from `start` on: fewer where the sound ends, none behind its end.

        Raises `SoundError` for what the source holds there, and `ValueError` for a start that was let go.
        """
        if start < self._first:
            raise ValueError(f"sample {start} of {self.name} was let go; {self._first} is the first one kept")
        while not self._ended and self._first + len(self._held) < start + count:
            try:
                block = next(self._blocks, None)
                checked = None if block is None else self._checked(block)
            except SoundError as error:
                if not self._until_fault:
                    raise
                self.fault, checked = error, None
            if checked is None:
                self._ended = True
                break
            kept = self._held[max(0, min(start - self._first, len(self._held))) :]
            self._first += len(self._held) - len(kept)
            self._held = np.concatenate([kept, checked])
        begin = start - self._first
        return self._held[begin : begin + count]

    def _checked(self, block: np.ndarray) -> np.ndarray:
        wrong = ~(np.abs(block) <= LOUDEST)  # NaN is not
        if wrong.any():
            place = int(wrong.argmax())
            raise SoundError(
                f"{self.name} holds samples that are no sound",
                found=f"{block[place]:g} at {(self._first + len(self._held) + place) / RATE:.2f} s",
                allowed=f"finite numbers of at most {LOUDEST:g}; full scale is 1",
            )
        return block


@contextlib.contextmanager
def opened(source: Any, *, until_fault: bool = False) -> Generator[Sound, None, None]:
    """A sound file of any rate and number of channels, or samples (T,) at 16 kHz in a float type.

    `until_fault` as of `Sound`; damaged packets of containers are then left out, with a notice.

    Raises `SoundError` for what is neither, and `TorchwrightError` where the packages that read files are missing.
    """
    if not isinstance(source, str | os.PathLike):
        yield of_samples(source, until_fault=until_fault)
        return
    with decoded(os.fspath(source), skip_damage=until_fault) as file:
        blocks = resampled(file.blocks, file.rate)
        yield Sound(file.name, blocks, file.seconds, file.notices, until_fault=until_fault)


def of_samples(samples: Any, *, until_fault: bool = False) -> Sound:
    """Samples (T,) at 16 kHz: an array, a tensor or a list of floats. Raises `SoundError` for anything else."""
    if hasattr(samples, "detach"):
        samples = samples.detach().cpu().float().numpy()
    try:
        array = np.asarray(samples)
    except ValueError as error:
        raise SoundError("the samples are no array", found=str(error)) from error
    if array.ndim != 1 or array.dtype.kind != "f":
        raise SoundError(
            "the samples cannot be used",
            found=f"{array.dtype} of shape {list(array.shape)}",
            allowed="floats from −1 to 1 at 16 kHz in one dimension",
            next="take the mean of the channels; divide integers of 16 bits by 32768",
        )
    parts = range(0, len(array), BLOCK)  # so that a mapped file is not read as a whole
    blocks = (array[i : i + BLOCK].astype(np.float32) for i in parts)
    return Sound("the samples", blocks, len(array) / RATE, until_fault=until_fault)


def resampled(blocks: Iterable[np.ndarray], rate: int) -> Iterator[np.ndarray]:
    """Mono blocks at another rate, by soxr's high-quality filter."""
    if rate == RATE:
        yield from blocks
        return
    need("soxr")
    import soxr

    stream = soxr.ResampleStream(rate, RATE, 1, dtype="float32")
    for block in blocks:
        yield stream.resample_chunk(block)
    yield stream.resample_chunk(np.empty(0, np.float32), last=True)
