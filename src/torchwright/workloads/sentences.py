"""Batches of sentences of different lengths, from a text."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

from torchwright.workloads.base import CALIBRATION_BATCHES
from torchwright.workloads.encoding import padded, plain_tokenizer
from torchwright.workloads.texts import Split, own_text, read_texts, spread, too_short


class Sentences:
    """A text's sentences as token ids, in batches that are each about as ragged as the text is.

    Without `text`, the bundled ones are used. Raises `WorkloadError` for a missing text; on first reading also for a
    text that is too short or a folder without a tokenizer.
    """

    def __init__(
        self, text: Path | None, folder: Path, *, batch: int, tokens: int, pad: int = 0, prompt: str = ""
    ) -> None:
        self._text, self._folder = own_text(text), folder
        self._batch, self._tokens, self._pad, self._prompt = batch, tokens, pad, prompt
        self._rows: Split[list[list[int]]] | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sentence, to which every batch is padded."""
        return len(self._read().evaluation[0])

    @property
    def batches(self) -> int:
        """Whole batches to judge by."""
        return len(self._read().evaluation) // self._batch

    def batch(self, index: int, *, calibration: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids, attention mask), both (B, T): batch `index` of what is evaluated, or of what calibrates.

        Each takes sentences from all over its text and is padded to the length of all batches.
        """
        rows, B = self._read(), self._batch
        if calibration:
            taken = spread(rows.calibration, CALIBRATION_BATCHES * B)[index * B : (index + 1) * B]
        else:
            taken = rows.evaluation[index % self.batches :: self.batches][:B]
        ids_BT, mask_BT = padded([rows.evaluation[0], *taken], self._pad)
        return ids_BT[1:], mask_BT[1:]

    def _read(self) -> Split[list[list[int]]]:
        """Token ids of both texts' sentences in their order, but for the longest to judge by, which comes first.

        A sentence that both have calibrates nothing, and nor does one that is longer than any to judge by.
        """
        if self._rows is None:
            rows = read_texts(self._text).map(self._token_ids)
            known = set(map(tuple, rows.evaluation))
            longest = max(map(len, rows.evaluation), default=0)
            kept = [row for row in rows.calibration if len(row) <= longest and tuple(row) not in known]
            found, needed = Split(len(rows.evaluation), len(kept)), Split(self._batch, 1)
            if found.evaluation < needed.evaluation or found.calibration < needed.calibration:
                raise too_short(self._text, found, needed, "sentences")
            first = next(index for index, row in enumerate(rows.evaluation) if len(row) == longest)
            self._rows = Split([rows.evaluation.pop(first), *rows.evaluation], kept)
        return self._rows

    def _token_ids(self, text: str) -> list[list[int]]:
        texts = [self._prompt + sentence for sentence in sentences(text)]
        return [row.ids for row in plain_tokenizer(self._folder, self._tokens).encode_batch(texts)]


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
