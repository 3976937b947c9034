"""Text in and out: the folder's tokenizer, and text that appears token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchwright.errors import ModelError, WorkloadError
from torchwright.workloads.generation import load_tokenizer
from torchwright.workloads.huggingface import read_object

INCOMPLETE = "\ufffd"
"""What a tokenizer puts in place of bytes that are no character, or not yet one."""


class Text:
    """The tokenizer of a model folder.

    Raises `WorkloadError` when the folder has no tokenizer.json, and `ModelError` when it cannot be read.
    """

    def __init__(self, folder: Path, bos: int | None) -> None:
        try:
            self._tokenizer: Any = load_tokenizer(folder)
        except Exception as error:  # tokenizers raises no class of its own
            raise ModelError(f"{folder / 'tokenizer.json'} cannot be read", found=str(error)) from error
        if self._tokenizer is None:
            raise WorkloadError(f"{folder} has no tokenizer.json", next="pass token ids instead of text")
        self._bos = bos if _adds_bos(folder) else None

    def encode(self, text: str) -> list[int]:
        """Token ids with the special tokens that the model expects around a text."""
        ids = self._tokenizer.encode(text, add_special_tokens=True).ids
        return ids if self._bos is None or ids[:1] == [self._bos] else [self._bos, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class TextStream:
    """Text of tokens that come one by one; all pieces and the rest together are the text of all tokens.

    A token may be a part of a character, and its text may depend on the token before it (a leading space). So a piece
    is what the text grows by when the new tokens are decoded together with those of the last piece, and is held back
    while it ends in an incomplete character.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._before: list[int] = []
        self._new: list[int] = []

    def put(self, token: int) -> str:
        """What can be shown after one more token, perhaps nothing."""
        self._new.append(token)
        grown = self._grown()
        if not grown or grown.endswith(INCOMPLETE):
            return ""
        self._before, self._new = self._new, []
        return grown

    def rest(self) -> str:
        """What was held back when no more tokens come."""
        grown = self._grown()
        self._before, self._new = [], []
        return grown

    def _grown(self) -> str:
        return self._text.decode(self._before + self._new)[len(self._text.decode(self._before)) :]


def _adds_bos(folder: Path) -> bool:
    """Whether tokenizer_config.json asks for the begin-of-text token; some tokenizer.json leave that to the library."""
    path = folder / "tokenizer_config.json"
    return path.is_file() and read_object(path).get("add_bos_token") is True
