"""Text in and out of token ids, without torch: the model folder's tokenizer, and the texts that end an answer."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from torchwright.core.regular_file import read_regular
from torchwright.hub.text_stream import TextStream
from torchwright.hub.tokenizer import (
    LARGEST_TOKENIZER,
    TOKENIZER,
    TokenizerFault,
    open_tokenizer,
    tokenizer_settings,
)
from torchwright.serve.api_error import invalid
from torchwright.serve.text.longest_token import byte_alphabet, longest_token

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
CONTEXT = 48
"""Last tokens of a prompt after which an answer's tokens are decoded: a word and its neighbours are fewer."""
CHARACTER = 4
"""Bytes of a character in UTF-8 at most."""


class Tokenizer:
    """The tokenizer of a model folder. Raises `ModelError` if it is missing or cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._fast = open_tokenizer(folder)
        spec = read_regular(folder / TOKENIZER, LARGEST_TOKENIZER)
        self.longest = longest_token(msgspec.json.decode(spec))
        """Characters that one token stands for at most; None where no number of tokens is sure."""
        settings = tokenizer_settings(folder)
        self._fast.no_truncation()
        self._fast.no_padding()
        self._bos = self._id(settings.get("bos_token")) if settings.get("add_bos_token") is True else None
        self._tokens: dict[int, tuple[str, list[int]]] = {}
        """A cache of `token`: answers with log-probabilities ask for the same few tokens again and again."""
        self._bytes = byte_alphabet() if "ByteLevel" in str(self._fast.decoder) else None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids, with the special tokens that the model expects around a text if `special`."""
        # Of a batch, because that is where the library lets go of the interpreter: other threads run meanwhile.
        try:
            [encoding] = self._fast.encode_batch_fast([text], add_special_tokens=special)
        except TokenizerFault as fault:
            raise invalid(f"the model's tokenizer fails on this text: {fault.found}") from fault
        ids: list[int] = encoding.ids
        if not special or self._bos is None or ids[:1] == [self._bos]:
            return ids
        return [self._bos, *ids]

    def letters(self, text: str) -> list[int]:
        """Return the token ids of a short text in which no special token is looked for; not for several threads."""
        return self._fast.encode_letters(text).ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of token ids; special tokens are left out unless `special`."""
        return self._fast.decode(ids, skip_special_tokens=not special)

    def marks(self, texts: Sequence[str]) -> dict[int, str]:
        """Return the special tokens, by their ids, that are whole in one of the texts: decoding leaves them out."""
        return {
            id: token.content
            for id, token in self._fast.get_added_tokens_decoder().items()
            if token.special and any(token.content in text for text in texts)
        }

    @property
    def specials(self) -> dict[int, str]:
        """The special tokens, which decoding leaves out, by their ids."""
        tokens = self._fast.get_added_tokens_decoder()
        return {id: token.content for id, token in tokens.items() if token.special}

    @property
    def added(self) -> frozenset[str]:
        """The texts of tokens that were added to the vocabulary, special ones and others."""
        return frozenset(token.content for token in self._fast.get_added_tokens_decoder().values())

    def context(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """Return a prompt's last tokens, as many as the text that follows may depend on, and their whole characters.

        Decoders drop the space before the first word of a text, so that the answer to a prompt is decoded after it.
        """
        start = max(0, len(ids) - CONTEXT)
        while start and self._is_byte(ids[start]):  # bytes in a row are decoded together
            start -= 1
        if start and not self.decode(ids[start:]).strip():
            start = 0
        tail = list(ids[start:])
        return tail, self.whole(tail)

    def whole(self, ids: Sequence[int]) -> str:
        """Return the text of token ids without a character at its end that is not complete."""
        last = b"".join(bytes(self.token(id)[1]) for id in ids[-CHARACTER:])
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(last)
        pending = len(decoder.getstate()[0])
        if not pending:
            return self.decode(ids)
        return self.decode(ids)[:-1] if self._bytes is not None else self.decode(ids[:-pending])

    def _is_byte(self, token: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._fast.id_to_token(token) or "") is not None

    def token(self, token: int) -> tuple[str, list[int]]:
        """One token as text and as the bytes that it stands for, which may be a part of a character."""
        known = self._tokens.get(token)
        if known is None:
            known = self._tokens[token] = self._token(token)
        return known

    def _token(self, token: int) -> tuple[str, list[int]]:
        piece = self._fast.id_to_token(token)
        if piece is None:
            return "", []
        raw = self._raw(piece)
        return raw.decode("utf-8", "replace"), list(raw)

    def _raw(self, piece: str) -> bytes:
        alphabet = self._bytes
        if alphabet is not None and all(character in alphabet for character in piece):
            return bytes(alphabet[character] for character in piece)
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode()

    def _id(self, token: Any) -> int | None:
        """The id of a special token, which tokenizer_config.json gives as text or as an object."""
        text = token.get("content") if isinstance(token, dict) else token
        try:
            return self._fast.token_to_id(text) if isinstance(text, str) else None
        except UnicodeEncodeError:  # half of a character
            return None


class MarkedStream:
    """A stream of text in which some special tokens appear as they are written, such as those around calls."""

    def __init__(self, text: TextStream, marks: Mapping[int, str]) -> None:
        self._text, self._marks = text, marks

    def put(self, token: int) -> str:
        """Return what can be shown after one more token, perhaps nothing."""
        mark = self._marks.get(token)
        return self._text.put(token) if mark is None else self._text.rest() + mark

    def rest(self) -> str:
        """Return what was held back when no more tokens come."""
        return self._text.rest()


class StopStrings:
    """Looks for the first of several strings in text that comes in pieces.

    Text that may be the beginning of one is held back until it is known.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._first = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def put(self, piece: str) -> tuple[str, str | None]:
        """(what can be shown, the stop string that was found). Nothing is to be put after one was found."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        found = min(
            ((at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=None
        )
        if found is not None:
            self._held = ""
            return text[: found[0]], found[2]
        keep = self._beginning(text)
        self._held = text[keep:]
        return text[:keep], None

    def rest(self) -> str:
        """Return the text that was held back when no more text follows."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Return where the longest suffix of `text` begins that is a prefix of a stop string."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._first and any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)
