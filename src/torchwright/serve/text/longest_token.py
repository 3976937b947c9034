"""The most characters of a text for which one token can stand, so that a text's length alone shows that it cannot
fit.

The rule: n tokens are at most n times `longest_token` characters. The number is the longest piece of the vocabulary,
times the factor by which the normalizer may shorten a text. It is None if characters may be dropped: white space or
control characters are stripped, separators are removed, or a whole word may be one unknown token. Components that are
not known here count as dropping.
"""

from __future__ import annotations

import math
from typing import Any

COMPOSED = 4
"""Characters that Unicode composes into one at most: the longest canonical decomposition of any."""
COMBINES = {
    "Lowercase": 1,
    "NFD": 1,
    "NFKD": 1,
    "NFC": COMPOSED,
    "NFKC": COMPOSED,
    "Prepend": 1,
    "ByteLevel": 1,
}
"""Normalizer → how many characters it makes one of at most."""
SPLITTERS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Punctuation", "Split"})
"""Pre-tokenizers that drop nothing but where their behavior is to remove."""


def longest_token(spec: dict[str, Any]) -> int | None:
    """For the plain data of a tokenizer.json: characters that one token stands for at most, or None."""
    shrinks = _shrinks(spec.get("normalizer"))
    added = spec.get("added_tokens") or []
    swallows = any(token.get("lstrip") or token.get("rstrip") for token in added)
    if shrinks is None or swallows or not _keeps(spec.get("pre_tokenizer")) or not _knows_all(spec):
        return None
    return shrinks * max(map(len, [*_pieces(spec["model"]), *(token["content"] for token in added)]))


def _shrinks(normalizer: dict[str, Any] | None) -> int | None:
    """Return the most characters that a normalizer merges into one; None if it may drop some."""
    if normalizer is None:
        return 1
    if normalizer["type"] == "Sequence":
        steps = [_shrinks(step) for step in normalizer["normalizers"]]
        return None if None in steps else math.prod(step for step in steps if step is not None)
    if normalizer["type"] == "Replace":
        before, after = normalizer["pattern"].get("String"), normalizer["content"]
        return -(-len(before) // len(after)) if before and after else None
    return COMBINES.get(normalizer["type"])


def _keeps(splitter: dict[str, Any] | None) -> bool:
    """Check whether a pre-tokenizer keeps every character."""
    if splitter is None:
        return True
    if splitter["type"] == "Sequence":
        return all(map(_keeps, splitter["pretokenizers"]))
    return splitter["type"] in SPLITTERS and splitter.get("behavior") != "Removed"


def _knows_all(spec: dict[str, Any]) -> bool:
    """Check whether every character becomes at least one token: by its bytes, or as an unknown token of its own."""
    model, pieces = spec["model"], frozenset(_pieces(spec["model"]))
    if model.get("type") == "BPE":
        if _is_byte_level(spec.get("normalizer")) or _is_byte_level(spec.get("pre_tokenizer")):
            return pieces.issuperset(byte_alphabet())
        if model.get("unk_token") in pieces and not model.get("fuse_unk"):
            return True
    elif model.get("type") != "Unigram":
        return False
    return bool(model.get("byte_fallback")) and pieces.issuperset(f"<0x{byte:02X}>" for byte in range(256))


def _is_byte_level(step: dict[str, Any] | None) -> bool:
    steps = (step or {}).get("normalizers") or (step or {}).get("pretokenizers") or [step]
    return any(one is not None and one["type"] == "ByteLevel" for one in steps)


def _pieces(model: dict[str, Any]) -> list[str]:
    """A vocabulary's pieces: the keys of an object, or the first of each pair of a list."""
    vocabulary = model["vocab"]
    return list(vocabulary) if isinstance(vocabulary, dict) else [piece for piece, _ in vocabulary]


def byte_alphabet() -> dict[str, int]:
    """The characters by which a byte-level tokenizer writes bytes: printable ones as they are, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}
