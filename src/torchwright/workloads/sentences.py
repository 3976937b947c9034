"""Batches of sentences of different lengths, from a text."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

from torchwright.errors import WorkloadError
from torchwright.workloads.encoding import padded, plain_tokenizer
from torchwright.workloads.language import BUNDLED


class Sentences:
    """A text's sentences as token ids, in batches that are each about as ragged as the text is.

    `text` is None for the bundled one. Raises `WorkloadError` for a text that is not there, and, when it is first
    read, for one that is too short or a folder without a tokenizer.
    """

    def __init__(
        self, text: Path | None, folder: Path, *, batch: int, tokens: int, pad: int = 0, prompt: str = ""
    ) -> None:
        self._text, self._folder = text or BUNDLED / "eval.txt", folder
        self._batch, self._tokens, self._pad, self._prompt = batch, tokens, pad, prompt
        self._rows: list[list[int]] | None = None
        if not self._text.is_file():
            raise WorkloadError(
                f"the evaluation text {self._text} is not there", next="pass --eval-text FILE"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest sentence, to which every batch is padded."""
        return len(self._read()[0])

    @property
    def batches(self) -> int:
        """Whole batches that the text is good for."""
        return len(self._read()) // self._batch

    def batch(self, index: int, *, calibration: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids, attention mask), both (B, T): batch `index` of the sample, or of what is kept for calibration.

        Each takes sentences from all over the text and is padded to the length of all batches.
        """
        rows = self._read()
        first = self.batches - 1 - index if calibration else index
        taken = rows[first % self.batches :: self.batches][: self._batch]
        ids_BT, mask_BT = padded([rows[0], *taken], self._pad)
        return ids_BT[1:], mask_BT[1:]

    def _read(self) -> list[list[int]]:
        """Token ids of the text's sentences in their order, but for the longest, which comes first."""
        if self._rows is None:
            tokenizer = plain_tokenizer(self._folder, self._tokens)
            texts = [
                self._prompt + text for text in sentences(self._text.read_text("utf-8", errors="replace"))
            ]
            rows: list[list[int]] = [e.ids for e in tokenizer.encode_batch(texts)]
            if len(rows) < 2 * self._batch:
                raise WorkloadError(
                    f"the evaluation text {self._text} is too short",
                    found=f"{len(rows)} sentences",
                    allowed=f"at least {2 * self._batch} for batches of {self._batch}",
                    next="pass a longer --eval-text FILE",
                )
            longest = max(range(len(rows)), key=lambda row: len(rows[row]))
            self._rows = [rows[longest], *rows[:longest], *rows[longest + 1 :]]
        return self._rows


def sentences(text: str) -> list[str]:
    """Sentences of a text, in their order: they end at . ! or ? before white space, and at empty lines.

    Left out are those of fewer than three words and those that are mostly not letters: tables, rulers, code.
    """
    paragraphs: Callable[[str], list[str]] = re.compile(r"\n\s*\n").split
    found = []
    for paragraph in paragraphs(text):
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
            letters = sum(map(str.isalpha, sentence))
            if len(sentence.split()) >= 3 and letters > 0.6 * len(sentence):
                found.append(sentence)
    return found
