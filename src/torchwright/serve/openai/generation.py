"""One client's request while the engine works on it: its sequences' tokens become text, step by step."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torchwright.hub.text_stream import TextStream
from torchwright.serve.api_error import ApiError, invalid, unavailable
from torchwright.serve.formats.reader import Event, Parser, Text, merged
from torchwright.serve.openai.prepare import PreparedRequest, TextRules
from torchwright.serve.text.codec import MarkedStream, StopStrings, Tokenizer
from torchwright.serve.wire.mailbox import Dropped, Item, Lost, Mailbox
from torchwright.serve.wire.messages import (
    Failed,
    Grammar,
    RequestRefused,
    Submit,
    Timing,
    TokenLogprob,
    TokenOutput,
)

_Answer = TypeVar("_Answer")
ONE_CALL = "one tool call"
"""The reason that ends a choice whose client wants no second call."""


class Engine(Protocol):
    """The interface of an engine to one request: `wire.client.EngineClient`, or `offline.engine.LocalEngine`."""

    def mailbox(self) -> Mailbox: ...

    def has_room_for(self, pictures: int) -> bool: ...

    def hold(self, grammar: Grammar) -> bool: ...

    def release(self, grammar: Grammar) -> None: ...

    def knows(self, id: str) -> bool: ...

    def submit(self, message: Submit, mailbox: Mailbox) -> None: ...

    def cancel(self, id: str, reason: str) -> None: ...

    def end_one(self, id: str, index: int, reason: str) -> None: ...

    def finish(self, id: str) -> None: ...


class Observed(Protocol):
    """A histogram."""

    def observe(self, amount: float) -> None: ...


class Measures(Protocol):
    """The interface of what counts tokens and times: `wire.metrics.ServerMetrics`."""

    @property
    def first_token(self) -> Observed: ...

    @property
    def inter_token(self) -> Observed: ...

    def finished(self, reason: str, seconds: float, tokens: int) -> None: ...


class Unmeasured:
    """Counts nothing: a batch has no waiting reader whose times matter."""

    def __init__(self) -> None:
        self.first_token = self.inter_token = self

    def observe(self, amount: float) -> None:
        """Drop a time."""

    def finished(self, reason: str, seconds: float, tokens: int) -> None:
        """Drop a count."""


class Gone(Exception):
    """The client has left, or does not read: nobody is answered."""


@dataclass(slots=True)
class ChoiceUpdate:
    """The engine's last message about one choice."""

    choice: int
    events: list[Event] = field(default_factory=list)
    """Reasoning, text and calls, in their order."""
    logprobs: list[TokenLogprob] | None = None
    tokens: Sequence[int] = ()
    """The new tokens as the engine chose them, a stop token included."""
    token_logprobs: Sequence[TokenLogprob] = ()
    """Those of `tokens`."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish: str | None = None
    """stop, length, timeout or abort, with the last step of a choice."""
    stop_reason: str | int | None = None
    """The stop string or the client's stop token that ended it."""

    @property
    def text(self) -> str:
        """The text among the events."""
        return "".join(event.text for event in self.events if isinstance(event, Text))


@dataclass
class _Sequence:
    choice: int
    rules: TextRules
    text: MarkedStream
    parser: Parser
    stops: StopStrings
    last: float
    tokens: int = 0
    stopped_by: str | None = None
    """A stop string that was found; the engine's confirmation is awaited, because it brings the timing."""
    ended: bool = False


@dataclass
class Totals:
    """Return the usage of a request so far."""

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Those of the completion's that were reasoning."""
    timings: dict[int, Timing] = field(default_factory=dict)
    """Choice → where its time went."""
    finishes: list[str] = field(default_factory=list)


class Generation:
    """Sends a prepared request and reads what comes.

    generation = Generation(prepared, client, tokenizer, metrics)
    async for steps in generation.steps(): …
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        client: Engine,
        tokenizer: Tokenizer,
        metrics: Measures,
        *,
        every_token: bool = False,
    ) -> None:
        """`every_token`: tokens that have no text yet make an update too."""
        self._every_token = every_token
        self.prepared, self._client, self._metrics = prepared, client, metrics
        self.totals = Totals(prompt_tokens=prepared.prompt_tokens)
        self.begun = time.perf_counter()
        self._mailbox = client.mailbox()
        self._submitted: set[str] = set()
        self._cancelled: set[str] = set()
        self._sequences = {
            (submit.id, index): _Sequence(
                choice=place * prepared.n + index,
                rules=prepared.rules[place],
                text=MarkedStream(
                    TextStream(tokenizer, *prepared.contexts[place]), prepared.rules[place].marks
                ),
                parser=prepared.parser(),
                stops=StopStrings(prepared.rules[place].stops),
                last=self.begun,
            )
            for place, submit in enumerate(prepared.submits)
            for index in range(prepared.n)
        }

    async def steps(self) -> AsyncGenerator[list[ChoiceUpdate], None]:
        """Steps as they come, until every choice has ended.

        Raises `ApiError` when the engine refuses the request, fails or dies, and `Gone` after `abandon`. Whatever has
        not ended when the iteration ends is cancelled.
        """
        pictures = sum(picture.bytes for submit in self.prepared.submits for picture in submit.pictures)
        if not self._client.has_room_for(pictures):
            raise ApiError(
                429, "the pictures of all requests take too much memory", headers={"Retry-After": "1"}
            )
        held = []
        reason = "abandoned"
        try:
            for grammar in self.prepared.grammars:
                if not self._client.hold(grammar):
                    raise ApiError(
                        429, "the grammars of all requests take too much memory", headers={"Retry-After": "1"}
                    )
                held.append(grammar)
            for submit in self.prepared.submits:
                if self._client.knows(submit.id):
                    raise invalid(f"the id '{submit.id.rpartition('-')[0]}' is in use", "rid", "id_in_use")
                self._client.submit(submit, self._mailbox)
                self._submitted.add(submit.id)
            while any(not sequence.ended for sequence in self._sequences.values()):
                steps = [step for item in await self._mailbox.take() if (step := self._read(item))]
                if steps:
                    yield steps
        except Gone as gone:
            reason = str(gone)
            raise
        finally:
            self._cancel(reason)
            for id in self._submitted:
                self._client.finish(id)
            for grammar in held:
                self._client.release(grammar)

    def abandon(self, reason: str) -> None:
        """Nobody waits any more: cancel at once."""
        self._cancel(reason)
        self._mailbox.put(Dropped(reason))

    def _cancel(self, reason: str) -> None:
        """Once for each of the engine's requests that has not ended."""
        for id in {id for (id, _), sequence in self._sequences.items() if not sequence.ended}:
            if id in self._submitted and id not in self._cancelled:
                self._client.cancel(id, reason)
                self._cancelled.add(id)

    def _read(self, item: Item) -> ChoiceUpdate | None:
        if isinstance(item, TokenOutput):
            return self._advance(item, self._sequences[item.id, item.index])
        if isinstance(item, Dropped):
            raise Gone(item.reason)
        if isinstance(item, RequestRefused):
            raise refusal(item)
        assert isinstance(item, Lost), f"{type(item).__name__} for a generating request"
        raise unavailable(item.reason)

    def _advance(self, output: TokenOutput, sequence: _Sequence) -> ChoiceUpdate | None:
        if sequence.ended:
            return None
        step = ChoiceUpdate(sequence.choice)
        if sequence.stopped_by is None:
            self._read_tokens(output, sequence, step)
        if output.finish is not None:
            self._end(output, sequence, step)
        told = step.events or step.finish or step.logprobs or step.prompt_logprobs
        return step if told or (self._every_token and step.tokens) else None

    def _read_tokens(self, output: TokenOutput, sequence: _Sequence, step: ChoiceUpdate) -> None:
        """Read tokens up to the one that ends the answer; accepted draft tokens behind that one are dropped."""
        tokens, logprobs, rules = output.tokens, output.logprobs, sequence.rules
        if tokens:
            self._clock(sequence)
        events, last = list[Event](), output.finish is not None
        ended = output.finish == "stop" and bool(tokens) and tokens[-1] in rules.stop_ids
        shown = tokens[:-1] if ended else tokens
        read = 0
        while read < len(shown) and sequence.stopped_by is None:
            self._count(sequence)
            events += self._read_token(shown[read], sequence)
            read += 1
        ended = ended and sequence.stopped_by is None
        if ended:
            self._count(sequence)
            step.stop_reason = tokens[-1] if tokens[-1] in rules.client_stop_ids else None
        if last and sequence.stopped_by is None:
            rest = [*sequence.parser.put(sequence.text.rest()), *sequence.parser.rest()]
            events += self._look_for_stops(rest, sequence, last=True)
            if sequence.stopped_by is None and sequence.parser.done:
                sequence.stopped_by = ONE_CALL
        if sequence.stopped_by is not None and not last:
            reason = ONE_CALL if sequence.stopped_by == ONE_CALL else "stop string"
            self._client.end_one(output.id, output.index, reason)
        whole = read + ended
        step.tokens, step.token_logprobs = tokens[:whole], (logprobs or ())[:whole]
        step.events, step.prompt_logprobs = merged(events), output.prompt_logprobs
        step.logprobs = logprobs and logprobs[:read]

    def _count(self, sequence: _Sequence) -> None:
        sequence.tokens += 1
        self.totals.completion_tokens += 1

    def _read_token(self, token: int, sequence: _Sequence) -> list[Event]:
        """Take a token apart into reasoning, text and calls, count it as reasoning, and look for what ends the text."""
        parser = sequence.parser
        events = parser.put(sequence.text.put(token))
        self.totals.reasoning_tokens += parser.reasoning
        events = self._look_for_stops(events, sequence, last=False)
        if sequence.stopped_by is None and parser.done:
            sequence.stopped_by = ONE_CALL
        return events

    def _look_for_stops(self, events: list[Event], sequence: _Sequence, *, last: bool) -> list[Event]:
        """Cut the answer before a stop string, which is looked for in its text: not in reasoning, nor in calls."""
        if sequence.tokens < sequence.rules.min_tokens:
            return events
        found, stops = list[Event](), sequence.stops
        for event in events:
            if not isinstance(event, Text):
                found += [Text(stops.rest()), event]
                continue
            text, sequence.stopped_by = stops.put(event.text)
            found.append(Text(text))
            if sequence.stopped_by is not None:
                break
        if last and sequence.stopped_by is None:
            found.append(Text(stops.rest()))
        return [event for event in found if not isinstance(event, Text) or event.text]

    def _end(self, output: TokenOutput, sequence: _Sequence, step: ChoiceUpdate) -> None:
        if output.finish == "error":
            raise ApiError(500, output.message or "the engine failed", code="engine_error")
        if output.finish == "grammar":
            raise ApiError(400, output.message or "the grammar is too slow", code="grammar_limit")
        if output.finish == "cancelled" and sequence.stopped_by is None:
            raise unavailable("the server is stopping")
        step.finish = output.finish
        if sequence.stopped_by is not None:
            step.finish, step.stop_reason = "stop", sequence.stopped_by
        sequence.ended = True
        self.totals.finishes.append(step.finish or "")
        if output.timing is not None:
            self.totals.timings[sequence.choice] = output.timing
        self._metrics.finished(step.finish or "", time.perf_counter() - self.begun, sequence.tokens)

    def _clock(self, sequence: _Sequence) -> None:
        now = time.perf_counter()
        if sequence.tokens:
            self._metrics.inter_token.observe(now - sequence.last)
        else:
            self._metrics.first_token.observe(now - self.begun)
        sequence.last = now


def refusal(item: RequestRefused) -> ApiError:
    """Return the error for a request that the engine does not take."""
    if item.reason == "queue_full":
        seconds = max(1, round(item.retry_after_s or 1))
        return ApiError(429, item.text, code="queue_full", headers={"Retry-After": str(seconds)})
    code = "context_length_exceeded" if item.reason == "too_long" else None
    return ApiError(400, item.text, code=code)


def expect(item: Item, kind: type[_Answer], param: str | None = None) -> _Answer:
    """Return the engine's results, for requests whose answers are of one kind.

    `param` is the field that a failure is about. Raises `ApiError` where the engine refused the request, failed or
    died, and `Gone` where the client left.
    """
    if isinstance(item, kind):
        return item
    if isinstance(item, Dropped):
        raise Gone(item.reason)
    if isinstance(item, RequestRefused):
        raise refusal(item)
    if isinstance(item, Lost):
        raise unavailable(item.reason)
    assert isinstance(item, Failed), f"{type(item).__name__} for {kind.__name__}"
    raise invalid(item.text, param)
