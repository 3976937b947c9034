"""A folder's tokenizer, opened in one way by all who read or write text. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchwright.errors import ModelError
from torchwright.hub.folder import find_object

TOKENIZER = "tokenizer.json"
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
    """The folder's fast tokenizer, None where it has no file of one; raises `ModelError` for one that is none."""
    path = folder / TOKENIZER
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{path} cannot be read", found=str(error)) from error


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """What tokenizer_config.json says beside it: special tokens by name, the chat template, `add_bos_token`."""
    return find_object(folder / "tokenizer_config.json")
