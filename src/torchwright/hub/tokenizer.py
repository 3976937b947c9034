"""A folder's tokenizer, opened in one way by all who read or write text. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchwright.core.errors import ModelError
from torchwright.hub.folder import find_object

TOKENIZER = "tokenizer.json"
LARGEST_TOKENIZER = 256 * 2**20
"""Bytes; published files have up to 35 MB."""
WRITE_ONE = "transformers writes one: AutoTokenizer.from_pretrained(…).save_pretrained(FOLDER)"


def open_tokenizer(folder: Path) -> Any:
    """The folder's fast tokenizer; raises `ModelError` where it has none, or none that can be read."""
    tokenizer = find_tokenizer(folder)
    if tokenizer is None:
        raise ModelError(
            f"{folder} has no {TOKENIZER}", allowed="a fast tokenizer's file beside the model", next=WRITE_ONE
        )
    return tokenizer


def find_tokenizer(folder: Path) -> Any | None:
    """Return the folder's fast tokenizer, None if it has no file for one; raises `ModelError` for an invalid file."""
    path = folder / TOKENIZER
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return SafeTokenizer(Tokenizer.from_file(str(path)), path)
    except BaseException as error:  # the library raises nothing more specific
        if not isinstance(error, Exception) and not _panicked(error):
            raise
        raise ModelError(f"{path} cannot be read", found=str(error)) from error


class TokenizerFault(ModelError):
    """A text that a folder's tokenizer fails on."""


class SafeTokenizer:
    """A fast tokenizer whose panics are errors.

    The library is written in Rust: its pattern matcher gives up on some patterns and texts with `PanicException`, which
    is no `Exception`.
    """

    def __init__(self, tokenizer: Any, path: Path) -> None:
        self.unwrapped, self._path = tokenizer, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("unwrapped", "_path"):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.unwrapped, name)

    def encode(self, *args: Any, **options: Any) -> Any:
        return self._call(self.unwrapped.encode, args, options)

    def encode_batch(self, *args: Any, **options: Any) -> Any:
        return self._call(self.unwrapped.encode_batch, args, options)

    def encode_batch_fast(self, *args: Any, **options: Any) -> Any:
        return self._call(self.unwrapped.encode_batch_fast, args, options)

    def encode_letters(self, text: str) -> Any:
        """Encode a text in which no special token is looked for.

        The tokenizer is changed meanwhile: only for a process that does one thing at a time.
        """
        self.unwrapped.encode_special_tokens = True
        try:
            return self.encode(text, add_special_tokens=False)
        finally:
            self.unwrapped.encode_special_tokens = False

    def decode(self, *args: Any, **options: Any) -> Any:
        return self._call(self.unwrapped.decode, args, options)

    def _call(self, method: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        try:
            return method(*args, **options)
        except BaseException as error:
            if not _panicked(error):
                raise
            raise TokenizerFault(
                f"the tokenizer {self._path} fails on this text",
                found=str(error),
                next="take the tokenizer.json of the model's publisher",
            ) from error


def _panicked(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json's fields: special tokens by name, the chat template, `add_bos_token`."""
    return find_object(folder / "tokenizer_config.json")
