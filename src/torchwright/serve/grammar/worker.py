"""The process that compiles grammars: `python -m torchwright.serve.grammar.worker FD FACTS` (`forks.py`).

xgrammar's compiler cannot be interrupted, so it runs where it can be killed, with a bound on its memory.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xgrammar

from torchwright.serve.grammar.compile import Compiled, GrammarJob
from torchwright.serve.grammar.lark.read import LarkRefused
from torchwright.serve.grammar.lark.write import is_lark, lark_grammar
from torchwright.serve.grammar.masks import tokenizer_info
from torchwright.serve.grammar.schema.elements import elements_grammar
from torchwright.serve.grammar.schema.emit import schema_grammar
from torchwright.serve.grammar.schema.parts import SchemaRefused
from torchwright.serve.grammar.schema.rules import quote
from torchwright.serve.workers import forks

REHEARSALS, REHEARSED_TOKENS = 4, 24
MASK_SECONDS = 0.1
"""Processor time limit for one token's mask."""


def load(folder: str, vocabulary: int, stop_ids: list[int]) -> Callable[[bytes], bytes]:
    """Return the compiler of grammars: a `GrammarJob` in MessagePack to a `Compiled`."""
    info = tokenizer_info(Path(folder), vocabulary, stop_ids)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(job: bytes) -> bytes:
        return msgspec.msgpack.encode(
            _compile(compiler, msgspec.msgpack.decode(job, type=GrammarJob), Warnings())
        )

    compile(
        msgspec.msgpack.encode(GrammarJob(kind="choice", text='["a"]'))
    )  # what the first needs, all find here
    return compile


class Warnings:
    """Capture xgrammar's standard error: parts of a schema that it would not enforce."""

    def __init__(self) -> None:
        self._file = os.memfd_create("warnings")
        self._stderr = os.dup(2)

    def __enter__(self) -> Warnings:
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        os.dup2(self._file, 2)
        return self

    def __exit__(self, *exception: object) -> None:
        os.dup2(self._stderr, 2)

    def first(self) -> str | None:
        """The first warning since the block began."""
        os.lseek(self._file, 0, os.SEEK_SET)
        _, found, text = os.read(self._file, 4096).decode("utf-8", "replace").partition("Warning: ")
        return text.splitlines()[0].strip() if found and text else None


def _compile(compiler: xgrammar.GrammarCompiler, job: GrammarJob, warnings: Warnings) -> Compiled:
    try:
        with warnings:
            whole = _grammar(job)
            compiled = compiler.compile_grammar(whole)
    except (SchemaRefused, LarkRefused) as refused:
        return Compiled(fault=str(refused))
    except (RuntimeError, ValueError, MemoryError) as error:
        return Compiled(fault=_reason(str(error)) or type(error).__name__)
    if warning := warnings.first():
        return Compiled(fault=f"it has a part that cannot be enforced: {warning}")
    if fault := _rehearse(compiled):
        return Compiled(fault=fault)
    if job.prefix:  # after the rehearsal, which would not get past reasoning
        prefix = _structural(job.prefix)
        compiled = compiler.compile_grammar(xgrammar.Grammar.concat(prefix, whole))
    return Compiled(json=compiled.serialize_json())


def _grammar(job: GrammarJob) -> xgrammar.Grammar:
    """Return the grammar of an answer without what comes before."""
    grammar = _form(job)
    if job.lead:
        grammar = xgrammar.Grammar.concat(_structural(job.lead), grammar)
    if job.calls:
        grammar = xgrammar.Grammar.union(_structural(job.calls), grammar)
    return grammar


def _form(job: GrammarJob) -> xgrammar.Grammar:
    if job.kind == "json":
        return xgrammar.Grammar.from_ebnf(schema_grammar(json.loads(job.text)))
    if job.kind == "regex":
        return xgrammar.Grammar.from_regex(job.text)
    if job.kind == "choice":
        rules = " | ".join(map(quote, json.loads(job.text)))
        return xgrammar.Grammar.from_ebnf(f"root ::= {rules}")
    if job.kind == "tools":
        return _structural(job.text)
    return xgrammar.Grammar.from_ebnf(lark_grammar(job.text) if is_lark(job.text) else job.text)


def _structural(tag: str) -> xgrammar.Grammar:
    """Return the grammar of a structural tag, whose schemas are enforced. Raises `SchemaRefused`."""
    return xgrammar.Grammar.from_structural_tag(json.dumps(_enforced(json.loads(tag))))


def _enforced(form: Any, after: str = "") -> Any:
    """Return a structural tag with our own grammars in place of schemas.

    Raises `SchemaRefused`, which names the text before the schema.
    """
    if isinstance(form, list):
        return [_enforced(item, after) for item in form]
    if not isinstance(form, dict):
        return form
    if form.get("type") == "json_schema":
        try:
            style = form.get("style")
            schema = form["json_schema"]
            grammar = elements_grammar(schema, style) if style else schema_grammar(schema)
        except SchemaRefused as refused:
            raise SchemaRefused(refused.path, f"{refused.reason} (after {after})") from None
        return {"type": "grammar", "grammar": grammar}
    begin = form.get("begin")
    after = begin.strip() if isinstance(begin, str) else after
    return {key: _enforced(item, after) for key, item in form.items()}


def _rehearse(compiled: xgrammar.CompiledGrammar) -> str | None:
    """Follow the grammar along texts that it allows; what would be wrong with it in the engine, or None.

    A schema that only refers to itself allows no first token, and a grammar of nested repetitions makes every mask
    dearer than the last: either would stop the engine for all its requests.
    """
    vocabulary = compiled.tokenizer_info.vocab_size
    mask: Any = xgrammar.allocate_token_bitmask(1, vocabulary)
    choose = random.Random(0)
    for walk in range(REHEARSALS):
        matcher: Any = xgrammar.GrammarMatcher(compiled)
        for step in range(REHEARSED_TOKENS):
            begun = time.thread_time()
            mask.fill_(-1)
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")[:vocabulary]
            allowed = bits.nonzero()[0]
            if not len(allowed):
                return "no text matches it" if step == 0 else "it leads to where nothing can follow"
            # By turns the first allowed token, which stays in a repetition, and any.
            token = allowed[0] if walk == 0 else choose.choice(allowed)
            matcher.accept_token(int(token))
            seconds = time.thread_time() - begun
            if seconds > MASK_SECONDS:
                return f"one of its tokens takes {seconds:.2f} s to follow, and at most {MASK_SECONDS} may be"
            if matcher.is_terminated():
                break
    return None


def _reason(text: str) -> str:
    """xgrammar's message without the time and the place in its source."""
    return text.rpartition(".cc:")[2].partition(": ")[2].strip() if ".cc:" in text else text.strip()


if __name__ == "__main__":
    forks.main(sys.argv[1:], load)
