"""The contents of a row: whether it was clicked, numbers, and categories as rows of their tables."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from torchwright.train.recommender.config import LABEL, RecommenderRun

HEXADECIMAL = set("0123456789abcdefABCDEF")
MISSING = 0
"""The row of every table that stands for a category that is not there."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a run's files, and what becomes of them."""

    labelled: bool
    """True if rows say whether they were clicked; otherwise each row is a click."""
    numbers: tuple[str, ...]
    tables: tuple[tuple[str, int], ...]
    """(category, rows of its table)."""
    hexadecimal: bool

    @classmethod
    def of(cls, run: RecommenderRun) -> Columns:
        """Those of a run."""
        return cls(
            labelled=run.dlrm is not None,
            numbers=tuple(run.dlrm.numbers) if run.dlrm else (),
            tables=tuple(run.model.columns.items()),
            hexadecimal=run.data.hexadecimal,
        )

    @property
    def names(self) -> list[str]:
        """In the order of a file without a header."""
        return [*([LABEL] if self.labelled else []), *self.numbers, *(name for name, _ in self.tables)]

    @property
    def width(self) -> int:
        """Numbers of a converted row."""
        return 1 + len(self.numbers) + len(self.tables)

    def convert(self, rows: Sequence[Sequence[str]]) -> np.ndarray:
        """(N, width) int32 of rows of texts in the order of `names`: the label and the numbers as float32's bits, then
        the tables' rows.

        A number x becomes log(1 + x), one that is missing or negative 0. A category becomes 1 + hash mod (rows - 1),
        where the hash of a hexadecimal number is the number and that of any other text its CRC-32. Raises `ValueError`
        where a row cannot be read.
        """
        by_column = list(zip(*rows, strict=True))
        if len(by_column) != len(self.names):
            raise ValueError(f"{len(by_column)} fields")
        first = 1 if self.labelled else 0
        out = np.empty((len(rows), self.width), np.int32)
        told = out.view(np.float32)
        told[:, 0] = _labels(by_column[0]) if self.labelled else 1.0
        for place, texts in enumerate(by_column[first : first + len(self.numbers)], 1):
            values = np.array([text or "0" for text in texts], np.float64)
            if not np.isfinite(values).all():
                raise ValueError("a number that is not finite")
            told[:, place] = np.log1p(values.clip(0))
        categories = by_column[first + len(self.numbers) :]
        for place, (texts, (_, size)) in enumerate(
            zip(categories, self.tables, strict=True), 1 + len(self.numbers)
        ):
            out[:, place] = self._hashed(texts, size)
        return out

    def explain(self, row: Sequence[str]) -> str:
        """Why `convert` refuses a row."""
        names = self.names
        if len(row) != len(names):
            return f"{len(row)} fields in place of {len(names)}"
        if self.labelled and row[0] not in ("0", "1"):
            return f"'{LABEL}' is '{row[0][:40]}', which is neither 0 nor 1"
        for name, text in zip(names, row, strict=True):
            if name in self.numbers and text and not _is_number(text):
                return f"'{name}' is '{text[:40]}', which is no number"
            if self.hexadecimal and name in dict(self.tables) and not set(text) <= HEXADECIMAL:
                return f"'{name}' is '{text[:40]}', which is no hexadecimal number"
        return "it cannot be read"

    def _hashed(self, texts: Sequence[str], size: int) -> list[int]:
        if not self.hexadecimal:
            return [1 + zlib.crc32(text.encode()) % (size - 1) if text else MISSING for text in texts]
        if not set("".join(texts)) <= HEXADECIMAL:
            raise ValueError("a category that is not hexadecimal")
        return [1 + int(text, 16) % (size - 1) if text else MISSING for text in texts]


def _labels(texts: Sequence[str]) -> np.ndarray:
    if not set(texts) <= {"0", "1"}:
        raise ValueError("a label that is neither 0 nor 1")
    return np.array(texts, np.float32)


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False
