"""Grammars of JSON schemas, followed without a model: by texts that are given, and by random tokens."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np
import xgrammar

from torchwright.serve.grammar.schema.emit import schema_grammar

PIECES = [
    '", "',
    '":',
    '": ',
    "{}",
    "[]",
    "true",
    "false",
    "null",
    '{"',
    '"}',
    "\\u00",
    "é",
    "ab",
    "12",
    "\\\\",
    "😀",
]
VOCABULARY = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES]
END = len(VOCABULARY)
LIKELY = frozenset(b'"}],0123456789abcx ')
"""Bytes that are drawn more often, so that walks come to an end."""


@cache
def compiler() -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo([*VOCABULARY, b"<end>"], stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def compiled(schema: Any) -> xgrammar.CompiledGrammar:
    """The grammar of a schema; raises `SchemaRefused`."""
    return compiler().compile_grammar(schema_grammar(schema))


def accepts(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    """Check whether a whole text is allowed."""
    matcher = xgrammar.GrammarMatcher(grammar)
    return matcher.accept_string(text) and matcher.accept_token(END)


def takes(schema: Any, value: Any) -> bool:
    """Check whether a value is allowed as Python writes it."""
    return accepts(compiled(schema), json.dumps(value, ensure_ascii=False))


def walk(grammar: xgrammar.CompiledGrammar, choose: random.Random, most: int = 300) -> str | None:
    """A text of random tokens that are allowed; None where it does not end in time."""
    matcher: Any = xgrammar.GrammarMatcher(grammar)
    mask: Any = xgrammar.allocate_token_bitmask(1, END + 1)
    text = b""
    for _ in range(most):
        mask.fill_(-1)
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")[: END + 1]
        allowed = bits.nonzero()[0].tolist()
        assert allowed, f"nothing can follow {text!r}"
        if END in allowed and choose.random() < 0.5:
            return text.decode()
        likely = [token for token in allowed if token in LIKELY]
        token = choose.choice(likely if likely and choose.random() < 0.7 else allowed)
        if token == END:
            return text.decode()
        assert matcher.accept_token(token)
        text += VOCABULARY[token]
    return None
