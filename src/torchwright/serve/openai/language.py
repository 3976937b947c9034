"""Tokenizer and chat template of a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchwright.hub.chat_template import ChatTemplate
from torchwright.serve.text.codec import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Language:
    """Of one model folder."""

    tokenizer: Tokenizer
    template: ChatTemplate


@dataclass(frozen=True)
class Prompts:
    """What a request wants continued, as texts or as token ids."""

    items: Sequence[str] | Sequence[list[int]]
    param: str
    """The request's field that they come from."""
    special: bool
    """Whether texts get the special tokens around them."""


def load_language(folder: Path) -> Language:
    """Open a folder's tokenizer and chat template, which is not parsed; raise `ModelError` for unreadable files."""
    return Language(tokenizer=Tokenizer(folder), template=ChatTemplate(folder, parse=False))
