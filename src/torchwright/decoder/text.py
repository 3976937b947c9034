"""Text in and out: the folder's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchwright.errors import ModelError, WorkloadError
from torchwright.text_stream import TextStream
from torchwright.workloads.generation import load_tokenizer
from torchwright.workloads.huggingface import read_object

__all__ = ["Text", "TextStream"]


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


def _adds_bos(folder: Path) -> bool:
    """Whether tokenizer_config.json asks for the begin-of-text token; some tokenizer.json leave that to the library."""
    path = folder / "tokenizer_config.json"
    return path.is_file() and read_object(path).get("add_bos_token") is True
