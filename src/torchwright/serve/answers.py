"""Answers in OpenAI's shape, whole or as events of a stream. Plain data, encoded by msgspec: this runs for every token.

An `Answer` is given every `Step`, through `events` where it is streamed and through `put` where it is not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from torchwright.serve.generation import Generation, Step
from torchwright.serve.messages import Timing, TokenLogprob
from torchwright.serve.text import Tokenizer
from torchwright.serve.tools import CallArguments, CallBegin, CallParser, Event, Text

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""What stands for a probability of 0, which JSON cannot write."""
_encode = msgspec.json.Encoder().encode


class Answer(Protocol):
    """How one kind of request is answered."""

    def put(self, step: Step) -> None:
        """One more step of an answer that is given whole."""
        ...

    def whole(self) -> dict[str, Any]:
        """The answer, after all steps."""
        ...

    def begin(self) -> bytes:
        """What a stream begins with."""
        ...

    def events(self, step: Step) -> bytes:
        """What one step adds to a stream, perhaps nothing."""
        ...

    def end(self) -> bytes:
        """What a stream ends with."""
        ...


@dataclass(kw_only=True)
class Facts:
    """What every kind of answer says about its request."""

    id: str
    model: str
    fingerprint: str
    generation: Generation
    tokenizer: Tokenizer
    usage: bool
    """Whether a stream ends with the usage."""
    timing: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def end(self, head: dict[str, Any]) -> bytes:
        """The last events of a stream: usage and timing where they were asked for."""
        last = {**head, "choices": []}
        last |= {"usage": usage(self.generation)} if self.usage else {}
        last |= {"timing": timing(self.generation)} if self.timing else {}
        return (event(last) if self.usage or self.timing else b"") + DONE

    def whole(self, head: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
        answer = {**head, "choices": choices, "usage": usage(self.generation)}
        return answer | ({"timing": timing(self.generation)} if self.timing else {})


@dataclass
class _Choice:
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    parser: CallParser | None = None
    finish: str | None = None
    stop_reason: str | int | None = None
    offset: int = 0
    """Characters of the tokens that were scored so far."""


class CompletionAnswer:
    """Answers POST /v1/completions."""

    def __init__(self, facts: Facts, *, echo: Sequence[list[int]] | None, logprobs: bool) -> None:
        self._facts, self._logprobs = facts, logprobs
        n = facts.generation.prepared.n
        self._choices = [_Choice() for _ in range(n * len(facts.generation.prepared.submits))]
        self._head = facts.head("text_completion")
        self._prompt_logprobs: dict[int, list[TokenLogprob | None]] = {}
        self._echo = {
            choice: facts.tokenizer.decode(echo[choice // n]) for choice in range(len(self._choices)) if echo
        }

    def put(self, step: Step) -> None:
        choice = self._choices[step.choice]
        choice.text.append(step.text)
        choice.logprobs.extend(step.logprobs or [])
        if step.prompt_logprobs is not None:
            self._prompt_logprobs[step.choice] = step.prompt_logprobs
        if step.finish:
            choice.finish, choice.stop_reason = step.finish, step.stop_reason

    def whole(self) -> dict[str, Any]:
        n = self._facts.generation.prepared.n
        choices = []
        for index, choice in enumerate(self._choices):
            # The n answers of one prompt share its scores, which come with the first.
            scored = [*self._prompt_logprobs.get(index - index % n, []), *choice.logprobs]
            text = self._echo.get(index, "") + "".join(choice.text)
            choices.append(self._choice(index, text, choice, scored))
        return self._facts.whole(self._head, choices)

    def begin(self) -> bytes:
        chunks = (self._choice(index, text, _Choice(), []) for index, text in self._echo.items())
        return b"".join(event({**self._head, "choices": [chunk]}) for chunk in chunks)

    def events(self, step: Step) -> bytes:
        choice = self._choices[step.choice]
        if step.finish:
            choice.finish, choice.stop_reason = step.finish, step.stop_reason
        chunk = self._choice(step.choice, step.text, choice, list(step.logprobs or []))
        return event({**self._head, "choices": [chunk]})

    def end(self) -> bytes:
        return self._facts.end(self._head)

    def _choice(
        self, index: int, text: str, choice: _Choice, scored: list[TokenLogprob | None]
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._scores(choice, scored, index) if self._logprobs else None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }

    def _scores(self, choice: _Choice, scored: list[TokenLogprob | None], index: int) -> dict[str, Any]:
        """OpenAI's older form. A prompt's first token has no probability."""
        token = self._facts.tokenizer.token
        prepared = self._facts.generation.prepared
        ids = prepared.submits[index // prepared.n].ids
        texts = [token(ids[0])[0] if score is None else token(score.token)[0] for score in scored]
        offsets = []
        for text in texts:
            offsets.append(choice.offset)
            choice.offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if score is None else _finite(score.logprob) for score in scored],
            "top_logprobs": [
                None if score is None else {token(id)[0]: _finite(logprob) for id, logprob in score.top}
                for score in scored
            ],
            "text_offset": offsets,
        }


class ChatAnswer:
    """Answers POST /v1/chat/completions."""

    def __init__(self, facts: Facts, *, logprobs: bool, parsers: Sequence[CallParser]) -> None:
        self._facts, self._logprobs = facts, logprobs
        self._choices = [_Choice() for _ in range(facts.generation.prepared.n)]
        for choice, parser in zip(self._choices, parsers, strict=bool(parsers)):
            choice.parser = parser
        self._head = facts.head("chat.completion.chunk")

    def put(self, step: Step) -> None:
        choice = self._choices[step.choice]
        choice.logprobs.extend(step.logprobs or [])
        for item in self._read(step):
            if isinstance(item, Text):
                choice.text.append(item.text)
            elif isinstance(item, CallBegin):
                function = {"name": item.name, "arguments": ""}
                choice.calls.append({"id": item.id, "type": "function", "function": function})
            else:
                choice.calls[item.index]["function"]["arguments"] += item.text

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self._choices):
            text = "".join(choice.text)
            message: dict[str, Any] = {
                "role": "assistant",
                "content": None if choice.calls and not text else text,
                "refusal": None,
            }
            if choice.calls:
                message["tool_calls"] = choice.calls
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._scores(choice.logprobs),
                    "finish_reason": choice.finish,
                    "stop_reason": choice.stop_reason,
                }
            )
        return self._facts.whole(self._facts.head("chat.completion"), choices)

    def begin(self) -> bytes:
        return b"".join(
            self._chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self._choices))
        )

    def events(self, step: Step) -> bytes:
        deltas = [_delta(item) for item in self._read(step)]
        if not deltas and (step.finish or step.logprobs):
            deltas = [{}]
        last = len(deltas) - 1
        return b"".join(
            self._chunk(step.choice, delta, step if place == last else None)
            for place, delta in enumerate(deltas)
        )

    def end(self) -> bytes:
        return self._facts.end(self._head)

    def _read(self, step: Step) -> Iterator[Event]:
        """The step's text, taken apart where the answer may hold calls."""
        choice = self._choices[step.choice]
        parser = choice.parser
        if parser is not None:
            yield from parser.put(step.text)
            yield from parser.rest() if step.finish else ()
            if parser.done and not step.finish:
                self._facts.generation.end_choice(step.choice, "one tool call")
        elif step.text:
            yield Text(step.text)
        if step.finish:
            called = parser is not None and (parser.done or (parser.begun > 0 and step.finish == "stop"))
            choice.finish = "tool_calls" if called else step.finish
            choice.stop_reason = step.stop_reason

    def _chunk(self, index: int, delta: dict[str, Any], step: Step | None = None) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if step is not None:
            choice["logprobs"] = self._scores(step.logprobs or [])
            if step.finish:
                choice["finish_reason"] = self._choices[index].finish
                choice["stop_reason"] = self._choices[index].stop_reason
        return event({**self._head, "choices": [choice]})

    def _scores(self, scored: Sequence[TokenLogprob | None]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        token = self._facts.tokenizer.token
        content = []
        for score in scored:
            assert score is not None, "only a prompt's first token has no score"
            top = [_score(*token(id), logprob) for id, logprob in score.top]
            content.append(_score(*token(score.token), score.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}


def usage(generation: Generation) -> dict[str, Any]:
    """Tokens of the prompts and of all answers; those of the prompts that were found in the prefix cache."""
    totals, n = generation.totals, generation.prepared.n
    cached = sum(timing.cached_tokens for choice, timing in totals.timings.items() if choice % n == 0)
    return {
        "prompt_tokens": totals.prompt_tokens,
        "completion_tokens": totals.completion_tokens,
        "total_tokens": totals.prompt_tokens + totals.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def timing(generation: Generation) -> dict[str, Any]:
    """Where the time went, in seconds, for each choice; and where its prompt came from."""
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
        },
    }


def _delta(item: Event) -> dict[str, Any]:
    if isinstance(item, Text):
        return {"content": item.text}
    if isinstance(item, CallArguments):
        return {"tool_calls": [{"index": item.index, "function": {"arguments": item.text}}]}
    function = {"name": item.name, "arguments": ""}
    return {"tool_calls": [{"index": item.index, "id": item.id, "type": "function", "function": function}]}


def _score(text: str, raw: list[int], logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": raw}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
