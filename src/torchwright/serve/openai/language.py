"""Tokenizer, chat template and reader of pictures of a model folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchwright.hub.chat_template import ChatTemplate
from torchwright.models.vision.reader import PictureReader, takes_pictures
from torchwright.models.vision.record import Picture
from torchwright.serve.text.codec import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Language:
    """The tokenizer, the chat template and the reader of pictures of one model folder."""

    tokenizer: Tokenizer
    template: ChatTemplate
    pictures: PictureReader | None = None
    """Reads pictures in the process that reads bodies; None for a model that takes text alone."""
    fetched: Mapping[str, bytes] = field(default_factory=dict)
    """The contents of one request's http(s) URLs."""


@dataclass(frozen=True)
class Prompts:
    """The prompts of a request, as texts or as token ids."""

    items: Sequence[str] | Sequence[list[int]]
    param: str
    """The request's field that they come from."""
    special: bool
    """True if texts get special tokens around them."""
    pictures: Sequence[Picture] = ()
    """Those of the one prompt of a conversation."""
    literal: Mapping[str, str] = field(default_factory=dict)
    """Mark in a text → a word of the client's, whose letters are tokenized even where they are a special token's."""

    def encode(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Return the token ids of one of the texts."""
        if not self.literal:
            return tokenizer.encode(text, special=self.special)
        ids, special = list[int](), self.special
        for piece in re.split(f"({'|'.join(self.literal)})", text):
            word = self.literal.get(piece)
            ids += tokenizer.encode(piece, special=special) if word is None else tokenizer.letters(word)
            special = False
        return ids


def load_language(folder: Path) -> Language:
    """Open a folder's tokenizer and chat template, which is not parsed; raise `ModelError` for unreadable files."""
    return Language(
        tokenizer=Tokenizer(folder),
        template=ChatTemplate(folder, parse=False),
        pictures=PictureReader(folder) if takes_pictures(folder) else None,
    )
