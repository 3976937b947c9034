"""Text in and out: the folder's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchwright.core.errors import WorkloadError
from torchwright.hub.text_stream import TextStream
from torchwright.hub.tokenizer import find_tokenizer, tokenizer_settings

__all__ = ["FolderTokenizer", "TextStream"]


class FolderTokenizer:
    """The tokenizer of a model folder.

    Raises `WorkloadError` when the folder has no tokenizer.json, and `ModelError` when it cannot be read.
    """

    def __init__(self, folder: Path, bos: int | None) -> None:
        self._tokenizer: Any = find_tokenizer(folder)
        if self._tokenizer is None:
            raise WorkloadError(f"{folder} has no tokenizer.json", next="pass token ids instead of text")
        # Some tokenizer.json leave the begin-of-text token to the library.
        self._bos = bos if tokenizer_settings(folder).get("add_bos_token") is True else None

    def encode(self, text: str) -> list[int]:
        """Token ids with the special tokens that the model expects around a text."""
        ids = self._tokenizer.encode(text, add_special_tokens=True).ids
        return ids if self._bos is None or ids[:1] == [self._bos] else [self._bos, *ids]

    def vocabulary(self) -> dict[str, int]:
        """All tokens, added ones included, and their ids."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)
