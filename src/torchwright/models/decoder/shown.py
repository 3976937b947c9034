"""The pictures of a prompt, as the decoder takes them: embeddings in the places of the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from torchwright.core.errors import WorkloadError
from torchwright.models.decoder.axes import PromptAxes
from torchwright.models.decoder.batch import Batch, PictureRows, WholePictures


@dataclass(frozen=True)
class Embedded:
    """A picture's embeddings (N, E), and what is added behind the first layers."""

    rows_NE: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(rows.nbytes for rows in (self.rows_NE, *self.deep))

    def part(self, rows: slice) -> Embedded:
        return Embedded(self.rows_NE[rows], tuple(deep[rows] for deep in self.deep))


def joined(parts: Sequence[Embedded]) -> Embedded:
    """Return the embeddings one after another."""
    deep = zip(*(part.deep for part in parts), strict=True)
    return Embedded(torch.cat([part.rows_NE for part in parts]), tuple(torch.cat(rows) for rows in deep))


class EncodesPictures(Protocol):
    """A vision encoder (`models/vision/encoder.py`)."""

    tokens: tuple[int, ...]
    """The tokens that stand for a place of a picture, or of a video."""
    whole: bool
    """True if each token of a picture attends to the whole picture; then no forward call may end within one."""
    device: torch.device
    """The device of the embeddings."""

    runs_as: str | None
    """Its layers, precision and agreement, in words; None before it is loaded."""

    def load(self) -> None: ...

    def embed(self, picture: Any) -> Embedded: ...

    def axes(self, ids: Sequence[int], pictures: Sequence[Any]) -> PromptAxes | None: ...


@dataclass(frozen=True)
class Places:
    """The places of the pictures in a prompt."""

    places_N: np.ndarray
    """Their tokens' places, in order."""
    whole: bool
    """See `EncodesPictures`."""

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """First place and end of each run of tokens, a picture or a crop of one."""
        cuts = np.flatnonzero(np.diff(self.places_N) > 1) + 1
        return [(int(run[0]), int(run[-1]) + 1) for run in np.split(self.places_N, cuts) if len(run)]

    def end(self, start: int, stop: int) -> int:
        """Return the end of a forward call that begins at `start` and was to end at `stop`.

        A picture that is seen whole is not cut: the call ends before the picture, or behind it where it would be empty.
        """
        if self.whole:
            for first, last in self.runs:
                if first < stop < last:
                    return first if first > start else last
        return stop


@dataclass(frozen=True)
class Shown:
    """The pictures of one prompt."""

    places: Places
    embedded: Embedded
    axes: PromptAxes | None

    @classmethod
    def of(cls, vision: EncodesPictures, ids: Sequence[int], pictures: Sequence[Any]) -> Shown:
        """Encode a prompt's pictures. Raises `WorkloadError` where it has not as many places as they fill."""
        places = places_of(vision, ids, pictures)
        embedded = joined([vision.embed(picture) for picture in pictures])
        return cls(places, embedded, vision.axes(ids, pictures))


def places_of(vision: EncodesPictures, ids: Sequence[int], pictures: Sequence[Any]) -> Places:
    """Return the places of a prompt's pictures. Raises `WorkloadError` where they fill more or fewer."""
    places_N = np.flatnonzero(np.isin(ids, vision.tokens))
    filled = sum(picture.tokens for picture in pictures)
    if len(places_N) != filled:
        raise WorkloadError(
            f"the prompt has {len(places_N)} places for pictures, and its {len(pictures)} pictures fill {filled}"
        )
    return Places(places_N, vision.whole)


def with_pictures(batch: Batch, pieces: Iterable[tuple[Shown | None, int, int]]) -> Batch:
    """Return the batch with the embeddings of its pictures.

    A piece is a sequence's pictures, the place of its first token and how many there are, in the batch's order.
    """
    rows: list[np.ndarray] = []
    parts: list[Embedded] = []
    runs: list[tuple[int, range, int]] = []
    row = 0
    for sequence, (shown, start, count) in enumerate(pieces):
        if shown is not None:
            places_N = shown.places.places_N
            first, last = np.searchsorted(places_N, [start, start + count])
            if first < last:
                rows.append(places_N[first:last] - start + row)
                parts.append(shown.embedded.part(slice(first, last)))
                runs += [
                    (sequence, range(max(begin, start) - start + row, end - start + row), end)
                    for begin, end in (shown.places.runs if shown.places.whole else ())
                    if begin < start + count and end > start
                ]
        row += count
    if not parts:
        return batch
    embedded = joined(parts)
    rows_N = torch.from_numpy(np.concatenate(rows)).to(embedded.rows_NE.device)
    whole = _whole(batch, runs) if runs else None
    return replace(batch, pictures=PictureRows(rows_N, embedded.rows_NE, embedded.deep, whole))


def _whole(batch: Batch, runs: list[tuple[int, range, int]]) -> WholePictures:
    """The sequence, the rows and the end of each picture, as sequences of their own."""
    device = batch.ids_T.device
    starts = np.cumsum([0, *(len(rows) for _, rows, _ in runs)])
    return WholePictures(
        torch.tensor([row for _, rows, _ in runs for row in rows], device=device),
        batch.block_tables_BP[torch.tensor([sequence for sequence, _, _ in runs], device=device)],
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor([end for _, _, end in runs], dtype=torch.int32, device=device),
    )
