"""Answers in OpenAI's shape, whole or as events of a stream. Plain data, encoded by msgspec: this runs for every token.

An `ResponseWriter` is given every `ChoiceUpdate`, through `events` where it is streamed and through `put` where it is
not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from torchwright.serve.openai.generation import ChoiceUpdate, Generation
from torchwright.serve.text.codec import Tokenizer
from torchwright.serve.wire.messages import Timing, TokenLogprob

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""The replacement for the logarithm of a probability of 0, which JSON cannot write."""
_encode = msgspec.json.Encoder().encode


class ResponseWriter(Protocol):
    """The interface for answers to one kind of request."""

    def put(self, step: ChoiceUpdate) -> None:
        """One more step of an answer that is given whole."""
        ...

    def whole(self) -> Any:
        """The answer as plain data, after all steps."""
        ...

    def begin(self) -> bytes:
        """Return the first events of a stream."""
        ...

    def events(self, step: ChoiceUpdate) -> bytes:
        """Return the events that one step adds to a stream, possibly none."""
        ...

    def end(self) -> bytes:
        """Return the last events of a stream."""
        ...


@dataclass(kw_only=True)
class Facts:
    """The fields that every kind of answer has about its request."""

    id: str
    model: str
    fingerprint: str
    generation: Generation
    tokenizer: Tokenizer
    usage: bool
    """True if a stream ends with the usage."""
    running_usage: bool = False
    """True if each of its events has the usage up to there as well."""
    timing: bool
    weights: bool = False
    """True if answers name the versions of the weights, which may change."""
    token_ids: bool = False
    """True if answers have the ids of their tokens."""
    id_names: bool = False
    """True if scored tokens are named by their ids."""
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def token(self, id: int) -> tuple[str, list[int]]:
        """Return the name of a scored token, and the bytes of its text."""
        text, raw = self.tokenizer.token(id)
        return (f"token_id:{id}" if self.id_names else text), raw

    def scored(self, step: ChoiceUpdate) -> Sequence[TokenLogprob]:
        """Return the scores of a step; with token ids, that of the token which ends the answer too."""
        return step.token_logprobs if self.token_ids else step.logprobs or ()

    def ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the field of a choice for its tokens' ids, if it has one."""
        return {"token_ids": list(tokens)} if self.token_ids else {}

    def prompt_ids(self, choice: int) -> dict[str, Any]:
        """Return the field for the ids of a choice's prompt, if there is one; with the first of `n` answers alone."""
        prepared = self.generation.prepared
        if not self.token_ids:
            return {}
        first = choice % prepared.n == 0
        return {"prompt_token_ids": prepared.submits[choice // prepared.n].ids if first else None}

    def chunk(self, head: dict[str, Any], choice: dict[str, Any]) -> bytes:
        """One event of a stream."""
        counted = {"usage": usage(self.generation)} if self.running_usage else {}
        return event({**head, "choices": [choice], **counted})

    def end(self, head: dict[str, Any]) -> bytes:
        """The last events of a stream: usage and timing where they were asked for."""
        last = {**head, "choices": []}
        last |= {"usage": usage(self.generation)} if self.usage else {}
        last |= {"timing": timing(self.generation)} if self.timing else {}
        last |= {"sglext": weight_versions(self.generation)} if self.weights else {}
        return (event(last) if self.usage or self.timing or self.weights else b"") + DONE

    def whole(self, head: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
        answer = {**head, "choices": choices, "usage": usage(self.generation)}
        answer |= {"sglext": weight_versions(self.generation)} if self.weights else {}
        return answer | ({"timing": timing(self.generation)} if self.timing else {})


@dataclass
class Choice:
    """One of a request's answers while it grows."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """With the one that ends the answer."""
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    called: bool = False
    """True if a call has begun."""
    finish: str | None = None
    stop_reason: str | int | None = None
    offset: int = 0
    """Characters of the tokens that were scored so far."""


def usage(generation: Generation) -> dict[str, Any]:
    """Tokens of the prompts and of all answers; those of the prompts that were found in the prefix cache.

    Proposals are counted as OpenAI counts those of a predicted output: accepted and rejected.
    """
    totals, n = generation.totals, generation.prepared.n
    cached = sum(timing.cached_tokens for choice, timing in totals.timings.items() if choice % n == 0)
    reasoning = totals.reasoning_tokens
    proposed, accepted = (
        sum(getattr(timing, name) for timing in totals.timings.values())
        for name in ("speculated_tokens", "accepted_tokens")
    )
    counts = {"reasoning_tokens": reasoning} if reasoning else {}
    if proposed:
        counts |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": proposed - accepted}
    details = {"completion_tokens_details": counts} if counts else {}
    return {
        "prompt_tokens": totals.prompt_tokens,
        "completion_tokens": totals.completion_tokens,
        "total_tokens": totals.prompt_tokens + totals.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        **details,
    }


def weight_versions(generation: Generation) -> dict[str, Any]:
    """Return the versions of the weights that chose the first answer's tokens, in SGLang's form."""
    found = generation.totals.timings.get(0)
    return version_spans([] if found is None else found.versions)


def version_spans(versions: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Return the last of an answer's versions, and which of its tokens each of them chose."""
    if not versions:
        return {}
    starts = [0, *(end for _, end in versions)]
    return {
        "weight_version": versions[-1][0],
        "weight_versions": [
            {"version": version, "start": start, "end": end}
            for start, (version, end) in zip(starts, versions, strict=False)
        ],
    }


def timing(generation: Generation) -> dict[str, Any]:
    """Return the timings in seconds of each choice, and the origin of its prompt."""
    prepared = generation.prepared
    return {
        "tokenize_s": prepared.tokenize_s,
        "grammar_compile_s": prepared.grammar_s,
        "total_s": prepared.tokenize_s + prepared.grammar_s + time.perf_counter() - generation.begun,
        "choices": [_timing(choice, timing) for choice, timing in sorted(generation.totals.timings.items())],
    }


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(data) + b"\n\n"


def _timing(choice: int, timing: Timing) -> dict[str, Any]:
    return {
        "index": choice,
        "queue_s": timing.queue_s,
        "prefill_s": timing.prefill_s,
        "decode_s": timing.decode_s,
        "grammar_s": timing.grammar_s,
        "preempted_s": timing.preempted_s,
        "preemptions": timing.preemptions,
        "prefix": {
            "cache_tokens": timing.cached_tokens,
            "computed_tokens": timing.computed_tokens,
        },
        "speculation": {
            "proposed_tokens": timing.speculated_tokens,
            "accepted_tokens": timing.accepted_tokens,
            "proposed_by_position": timing.proposed_at,
            "accepted_by_position": timing.accepted_at,
        },
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can write."""
    return max(logprob, LEAST_LOGPROB)
