"""Tokenizer and chat template of a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchwright.hub.chat_template import ChatTemplate
from torchwright.serve.text.codec import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Language:
    """The tokenizer and chat template of one model folder."""

    tokenizer: Tokenizer
    template: ChatTemplate


@dataclass(frozen=True)
class Prompts:
    """The prompts of a request, as texts or as token ids."""

    items: Sequence[str] | Sequence[list[int]]
    param: str
    """The request's field that they come from."""
    special: bool
    """True if texts get special tokens around them."""


def load_language(folder: Path) -> Language:
    """Open a folder's tokenizer and chat template, which is not parsed; raise `ModelError` for unreadable files."""
    return Language(tokenizer=Tokenizer(folder), template=ChatTemplate(folder, parse=False))
