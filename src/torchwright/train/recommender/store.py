"""Converted rows, made once of each file and kept in the run's folder: any process finds any row by its number.

RUN/rows/NAME-DIGEST.rows   (N, width) int32, as `Columns.convert` gives them
RUN/rows/NAME-DIGEST.json   what became of the file's rows
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchwright.core.errors import TorchwrightError
from torchwright.core.paths import file_digest
from torchwright.core.process.files import replacing
from torchwright.train.data.documents import FileReport
from torchwright.train.data.text import expand
from torchwright.train.recommender.columns import Columns
from torchwright.train.recommender.config import RecommenderRun
from torchwright.train.recommender.reading import form_of, read_blocks

FOLDER = "rows"
VERSION = 1
"""The version of the conversion of rows: another version converts them again."""


@dataclass(frozen=True, kw_only=True)
class ClickBatch:
    """Some rows: numbers (B, D) float32, categories (B, C) int64 as rows of their tables, clicked (B,) float32."""

    numbers_BD: torch.Tensor
    categories_BC: torch.Tensor
    clicked_B: torch.Tensor

    def __len__(self) -> int:
        return len(self.clicked_B)


class RowStream:
    """The rows of several parts, one after the other, then again from the first."""

    def __init__(self, parts: Sequence[np.ndarray], columns: Columns) -> None:
        """`parts` are (N, width) int32."""
        self.columns, self._parts = columns, parts
        self._ends = np.cumsum([len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, first: int, count: int) -> np.ndarray:
        """Rows `first` to `first + count`, of which the one behind the last is the first again."""
        found = []
        while count:
            place = first % len(self)
            part = int(np.searchsorted(self._ends, place, side="right"))
            at = place - (int(self._ends[part]) - len(self._parts[part]))
            piece = self._parts[part][at : at + count]
            found.append(piece)
            first, count = first + len(piece), count - len(piece)
        return np.concatenate(found) if found else np.empty((0, self.columns.width), np.int32)

    def batch(self, first: int, count: int, device: str) -> ClickBatch:
        """Return the rows of `take` as tensors."""
        rows, numbers = self.take(first, count), 1 + len(self.columns.numbers)
        told = rows.view(np.float32)
        return ClickBatch(
            numbers_BD=torch.from_numpy(told[:, 1:numbers].copy()).to(device),
            categories_BC=torch.from_numpy(rows[:, numbers:].astype(np.int64)).to(device),
            clicked_B=torch.from_numpy(told[:, 0].copy()).to(device),
        )


@dataclass(frozen=True, kw_only=True)
class Clicks:
    """A run's data, opened."""

    train: RowStream
    validation: RowStream | None
    reports: dict[str, FileReport]
    """The converted and broken rows of each file."""
    digest: str
    """The digest of the training rows."""


def open_clicks(run: RecommenderRun, folder: Path, out: Path) -> Clicks:
    """Convert every file, each by one of the processes, and map what they made. Raises `DataError` on all alike."""
    columns, cache = Columns.of(run), out / FOLDER
    train, validation = expand(run.data.train, folder), expand(run.data.validation, folder)
    files = [*train, *validation]
    told: dict[Path, tuple[Path, FileReport]] = {}
    fault: Exception | None = None
    try:
        for path in files[dist.get_rank() :: dist.get_world_size()]:
            told[path] = convert_file(path, columns, cache, header=run.data.header, strict=run.data.strict)
    except (TorchwrightError, OSError) as error:
        fault = error
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (told, fault))
    for others, error in everyone:
        if error is not None:
            raise error
        told |= others

    def mapped(paths: Sequence[Path]) -> list[np.ndarray]:
        return [np.memmap(told[path][0], np.int32, mode="r").reshape(-1, columns.width) for path in paths]

    return Clicks(
        train=RowStream(mapped(train), columns),
        validation=RowStream(mapped(validation), columns) if validation else None,
        reports={str(path): told[path][1] for path in files},
        digest=hashlib.sha256(" ".join(told[path][0].name for path in train).encode()).hexdigest()[:16],
    )


def convert_file(
    path: Path, columns: Columns, cache: Path, *, header: bool, strict: bool
) -> tuple[Path, FileReport]:
    """The file's converted rows in `cache` and what became of them, made unless they are there. Raises `DataError`."""
    name = form_of(path)
    key = hashlib.sha256(f"{VERSION} {file_digest(path)} {columns} {header}".encode()).hexdigest()[:16]
    made = cache / f"{path.name.removesuffix(name)}-{key}.rows"
    kept, report = made.with_suffix(".json"), FileReport()
    if kept.is_file():
        found = json.loads(kept.read_text("utf-8"))
        report = FileReport(**{**found, "listed": [(number, reason) for number, reason in found["listed"]]})
        if made.stat().st_size == 4 * columns.width * report.documents and not (strict and report.broken):
            return made, report
        report = FileReport()
    cache.mkdir(parents=True, exist_ok=True)
    with replacing(made) as new, new.open("wb") as file:
        for block in read_blocks(path, columns, report, header=header, strict=strict):
            file.write(block.tobytes())
    with replacing(kept) as new:
        new.write_text(json.dumps(vars(report)), "utf-8")
    return made, report
