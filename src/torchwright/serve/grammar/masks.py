"""Structured output: which tokens a sequence's grammar allows next, through xgrammar.

The HTTP process compiles a grammar and sends it as JSON, once; here it is read, and followed token by token. Reading
and filling masks happen on a thread of their own, which xgrammar lets run while the model computes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchwright.core.errors import WorkloadError
from torchwright.core.quiet import quiet_import
from torchwright.hub.tokenizer import find_tokenizer
from torchwright.serve.grammar.thinking import Thinking
from torchwright.serve.wire.messages import Grammar, Submit

TOKEN_SECONDS = 0.25
"""Processor time limit to advance a grammar by one token; a slower grammar ends its request. A filling thread cannot
be interrupted, and the other sequences of the step wait for it."""


def tokenizer_info(folder: Path, vocabulary: int, stop_ids: list[int]) -> Any:
    """xgrammar's description of a model folder's tokenizer; both processes must use this one.

    `vocabulary` counts the model's logits. Raises `WorkloadError` where the folder has no tokenizer.json or the model
    no stop token.
    """
    # It imports transformers, which takes a second.
    with quiet_import():
        import xgrammar
        from transformers import PreTrainedTokenizerFast

    tokenizer = find_tokenizer(folder)
    if tokenizer is None:
        raise WorkloadError(f"{folder} has no tokenizer.json", next="grammars need one")
    if not stop_ids:
        raise WorkloadError(f"the model in {folder} names no end-of-text token", next="grammars need one")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer.unwrapped)
    return xgrammar.TokenizerInfo.from_huggingface(wrapped, vocab_size=vocabulary, stop_token_ids=stop_ids)


class Constraint:
    """The grammar state of one sequence, which has accepted the sequence's answer so far."""

    def __init__(
        self,
        grammar: Future[Any],
        stop_ids: list[int],
        thinking: Callable[[], Thinking] | None,
        token_seconds: float,
    ) -> None:
        """`grammar` gives None for an answer of any text; `token_seconds` limits the cost of one token."""
        self._grammar, self._stop_ids, self._make_thinking = grammar, stop_ids, thinking
        self._token_seconds = token_seconds
        self.seconds = 0.0
        """Time spent on the grammar's masks, mostly while the model ran."""
        self.fault: str | None = None
        """Why the sequence cannot go on: one of its tokens took too long to follow."""

    @property
    def loading(self) -> Future[Any]:
        """Done when the grammar can be used; its exception is why it cannot."""
        return self._grammar

    @property
    def complete(self) -> bool:
        """True if nothing can follow: the text is complete and, if the request has stop tokens, one was accepted."""
        return self._matcher.is_terminated()

    def accept(self, token: int) -> bool:
        """Go on by one token; return whether the grammar allows it."""
        allowed = self._follow(token)
        if allowed and self._thinking is not None:
            self._thinking.accept(token)
        return allowed

    def accepted(self, proposals: list[int]) -> list[int]:
        """Return the first proposals, as many as the grammar and the bound of reasoning allow in a row."""
        if self._thinking is not None and (free := self._thinking.free) is not None:
            proposals = proposals[: max(0, free - 1)]  # the step itself adds one token
        count = next((i for i, token in enumerate(proposals) if not self._follow(token)), len(proposals))
        self._matcher.rollback(count)
        return proposals[:count]

    def fill(self, masks: torch.Tensor, first: int, proposals: list[int]) -> None:
        """The masks for the next token and for those after each of the proposals, all of which it allows."""
        begun, matcher = time.perf_counter(), self._matcher
        for place in range(len(proposals) + 1):
            with self._limited():
                if not matcher.is_terminated():  # else the row is not read
                    matcher.fill_next_token_bitmask(masks, first + place)
            if place < len(proposals):
                self._follow(proposals[place])
        forced = None if self._thinking is None else self._thinking.forced
        if forced is not None:
            row = np.zeros(masks.shape[1] * 32, np.uint8)
            row[forced] = 1
            masks.numpy()[first] = np.packbits(row, bitorder="little").view(np.int32)
        matcher.rollback(len(proposals))
        self.seconds += time.perf_counter() - begun

    def _follow(self, token: int) -> bool:
        with self._limited():
            return self._matcher.accept_token(token)

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """Limit the cost of one token, in thread time: other programs must not count against the grammar."""
        begun = time.thread_time()
        yield
        seconds = time.thread_time() - begun
        if seconds > self._token_seconds:
            self.fault = (
                f"the grammar took {seconds:.2f} s to follow by one token, "
                f"and at most {self._token_seconds} may be"
            )

    @cached_property
    def _thinking(self) -> Thinking | None:
        return None if self._make_thinking is None else self._make_thinking()

    @cached_property
    def _matcher(self) -> Any:
        grammar = self._grammar.result()
        if grammar is None:
            return AnyText()
        import xgrammar

        return xgrammar.GrammarMatcher(
            grammar,
            override_stop_tokens=self._stop_ids or None,
            terminate_without_stop_token=not self._stop_ids,
        )


class AnyText:
    """The matcher of an answer that has a bound of reasoning and no grammar: it takes every token."""

    def is_terminated(self) -> bool:
        return False

    def accept_token(self, token: int) -> bool:
        return True

    def fill_next_token_bitmask(self, masks: torch.Tensor, row: int) -> None:
        """Leave the row as it is: everything is allowed."""

    def rollback(self, count: int) -> None:
        """Forget nothing: nothing is kept."""


class Masks:
    """Which tokens the rows of one step may take, as bits that are being filled."""

    def __init__(self, bits: torch.Tensor, filling: Future[None], vocabulary: int) -> None:
        self._bits, self._filling, self._vocabulary = bits, filling, vocabulary

    def row(self, row: int) -> torch.Tensor:
        """Allowed tokens (V,) as booleans; waits for the filling thread."""
        self._filling.result()
        bits = np.unpackbits(self._bits[row].numpy().view(np.uint8), bitorder="little")
        return torch.from_numpy(bits[: self._vocabulary]).bool()


class Grammars:
    """The grammars of one model's requests, and the threads that work on them."""

    def __init__(self, folder: Path, vocabulary: int, stop_ids: list[int]) -> None:
        self._folder, self._vocabulary, self._stop_ids = folder, vocabulary, stop_ids
        self.token_seconds = TOKEN_SECONDS
        """The longest that a grammar may take to follow by one token; more ends its request."""
        # Reading a large grammar takes longer than a step, and must not delay other requests' masks.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read-grammar")
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="fill-masks")
        self._kept: dict[str, Future[Any]] = {}

    def warm(self) -> None:
        """Import what the first grammar needs, on the reading thread."""
        self._reader.submit(lambda: self._info)

    def keep(self, grammar: Grammar) -> None:
        """Read a grammar, for all sequences to come until `forget`."""
        self._kept[grammar.key] = self._reader.submit(self._read, grammar.json)

    def forget(self, key: str) -> None:
        """Only sequences that follow it already keep the grammar."""
        self._kept.pop(key, None)

    def keeps(self, key: str) -> bool:
        return key in self._kept

    def constraint(self, submit: Submit) -> Constraint | None:
        """Return the constraint of one sequence, by a grammar that is kept; None where the request has none."""
        budget = submit.thinking
        if submit.grammar is None and budget is None:
            return None
        thinking = None if budget is None else lambda: Thinking(budget, self._pieces)
        grammar = self._any_text if submit.grammar is None else self._kept[submit.grammar]
        return Constraint(grammar, submit.stop_ids, thinking, self.token_seconds)

    def fill(self, rows: int, wanted: list[tuple[Constraint, int, list[int]]]) -> Masks:
        """Begin to fill masks for `rows` rows: of each constraint from its first row on, one for each proposal more."""
        bits = torch.full((rows, -(-self._vocabulary // 32)), -1, dtype=torch.int32)
        return Masks(bits, self._filler.submit(_fill, bits, wanted), self._vocabulary)

    def close(self) -> None:
        for threads in (self._reader, self._filler):
            threads.shutdown(cancel_futures=True)

    @cached_property
    def _any_text(self) -> Future[None]:
        """Done once the tokens' bytes are known, by which reasoning is followed."""

        def read() -> None:
            _ = self._pieces

        return self._reader.submit(read)

    @cached_property
    def _info(self) -> Any:
        return tokenizer_info(self._folder, self._vocabulary, self._stop_ids)

    @cached_property
    def _pieces(self) -> list[bytes]:
        return self._info.decoded_vocab

    def _read(self, grammar: str) -> Any:
        info = self._info
        import xgrammar

        return xgrammar.CompiledGrammar.deserialize_json(grammar, info)


def _fill(bits: torch.Tensor, wanted: list[tuple[Constraint, int, list[int]]]) -> None:
    for constraint, first, proposals in wanted:
        constraint.fill(bits, first, proposals)
