"""Text that appears token by token. No torch here: what only passes text on need not wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

INCOMPLETE = "\ufffd"
"""The replacement character that a tokenizer writes for bytes that are not, or not yet, a character."""
HELD_TOKENS = 16
"""The most tokens without a complete character: a character has four bytes, so more of them are not text."""


class TokenDecoder(Protocol):
    """The interface of a decoder from token ids to text."""

    def decode(self, ids: Sequence[int]) -> str: ...


class TextStream:
    """The text of one sequence's tokens as they arrive; all pieces and the rest together are the text of all tokens.

    A token may be a part of a character, and its text may depend on the token before it (a leading space). So a piece
    is the text that the new tokens add when they are decoded together with those of the last piece, and is held back
    while it ends in an incomplete character.

    `before` are the tokens that the text continues, such as a prompt's last ones, and `before_text` is their text up
    to the last whole character.
    """

    def __init__(self, text: TokenDecoder, before: Sequence[int] = (), before_text: str = "") -> None:
        self._text = text
        self._before = list(before)
        self._before_text = before_text
        self._new: list[int] = []
        self._first = True
        """True if no piece was shown: the first may begin with tokens of `before`."""

    def put(self, *tokens: int) -> str:
        """Return what can be shown after more tokens, perhaps nothing."""
        return "".join(map(self._put, tokens))

    def _put(self, token: int) -> str:
        self._new.append(token)
        grown = self._grown()
        if not grown or (grown.endswith(INCOMPLETE) and len(self._new) < HELD_TOKENS):
            return ""
        self._before, self._new = [*self._before, *self._new] if self._first else self._new, []
        self._first = False
        self._before_text = self._text.decode(self._before)
        return grown

    def rest(self) -> str:
        """Return what was held back when no more tokens come."""
        grown = self._grown() if self._new else ""
        self._before, self._before_text, self._new = [], "", []
        return grown

    def _grown(self) -> str:
        return self._text.decode(self._before + self._new)[len(self._before_text) :]
