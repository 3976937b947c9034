"""The base of engines that answer with tokens: their live requests, what they report, and what they refuse."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, Literal

from torchwright.serve.engine.cores import CoreShare
from torchwright.serve.engine.sampling import Chooser
from torchwright.serve.grammar.masks import Constraint
from torchwright.serve.options import EngineOptions
from torchwright.serve.wire.messages import (
    Cancel,
    Finish,
    RequestRefused,
    Stats,
    StepOutput,
    Submit,
    Timing,
    TokenLogprob,
    TokenOutput,
)

RETRY_SECONDS = 1.0
"""Wait that a client is advised where the queue is full."""


GRAMMAR_WAIT_S = 0.02
"""A step that only waits for grammars to be read takes no longer."""


def count_places(counts: list[int], tokens: int) -> None:
    """Count tokens by their place, from the first on."""
    counts.extend([0] * (tokens - len(counts)))
    for place in range(tokens):
        counts[place] += 1


@dataclass(eq=False, kw_only=True)
class LiveRequest:
    """A request, and its answers that have not ended."""

    submit: Submit
    arrived: float
    answers: dict[int, Any] = field(default_factory=dict)
    """By their index."""


@dataclass(eq=False, kw_only=True)
class LiveAnswer:
    """One of a request's `n` answers."""

    request: Any
    """A `LiveRequest`."""
    index: int
    chooser: Chooser
    count: int = 0
    """Its tokens so far."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Those that were not reported yet."""

    @property
    def submit(self) -> Submit:
        return self.request.submit


@dataclass
class _Counts:
    """Fields of `Stats` that count since the engine's start, or are those of the last step."""

    steps: int = 0
    step_s: float = 0.0
    step_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    speculated_tokens: int = 0
    accepted_tokens: int = 0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def values(self) -> dict[str, Any]:
        """Return the fields, lists as they are now."""
        return vars(self) | {"proposed_at": [*self.proposed_at], "accepted_at": [*self.accepted_at]}

    def step(self, seconds: float, tokens: int) -> None:
        self.steps += 1
        self.step_s, self.step_tokens = seconds, tokens


class TokenEngine:
    """Requests by their id, and outputs until the next step reports them."""

    def __init__(self, options: EngineOptions | None, clock: Callable[[], float]) -> None:
        self.options, self._clock = options or EngineOptions(), clock
        self._cores = CoreShare(clock, time.thread_time)
        self._live: dict[str, Any] = {}
        self._outputs: list[TokenOutput] = []
        self._numbers = itertools.count()
        self._counts = _Counts()

    @property
    def idle(self) -> bool:
        """Return True if there is nothing to compute and nothing to report."""
        return not self._live and not self._outputs

    @property
    def requests(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def cancel(self, cancel: Cancel) -> None:
        """End a request, or one of its answers; their memory is free when this returns. Unknown ids have ended."""
        for index, answer in list(self._answers(cancel.id).items()):
            if cancel.index in (None, index):
                self._end(answer, cancel.finish, message=cancel.reason)

    def cancel_all(self, reason: str, finish: Literal["cancelled", "abort"] = "cancelled") -> None:
        """End every request."""
        for id in list(self._live):
            self.cancel(Cancel(id=id, reason=reason, finish=finish))

    def stats(self) -> Stats:
        """Return the engine's state now."""
        raise NotImplementedError

    def _answers(self, id: str) -> dict[int, Any]:
        """Return a request's answers that have not ended, by their index."""
        raise NotImplementedError

    def _end(self, answer: Any, finish: Finish, *, message: str = "") -> None:
        """Forget an answer, free its memory, and report the reason."""
        raise NotImplementedError

    def _stats(self, *, running: int, waiting: int, pages_used: int, pages: int, cached: int = 0) -> Stats:
        return Stats(
            running=running,
            waiting=waiting,
            pages_used=pages_used,
            pages_cached=cached,
            pages=pages,
            core_share=self._cores.value,
            **self._counts.values(),
        )

    def _reported(self) -> StepOutput:
        """Return what is to be reported, and the engine's state."""
        outputs, self._outputs = self._outputs, []
        return StepOutput(outputs=outputs, stats=self.stats())

    def _wait_for(self, constraints: Iterable[Constraint | None]) -> None:
        """Wait a short time for the first of these grammars to be read."""
        loading = [constraint.loading for constraint in constraints if constraint]
        futures.wait(loading, GRAMMAR_WAIT_S, futures.FIRST_COMPLETED)

    def _report(
        self,
        answer: Any,
        tokens: list[int],
        logprobs: list[TokenLogprob] | None,
        prompt_logprobs: list[TokenLogprob | None] | None,
        finish: Finish | None,
        message: str,
        timing: Timing | None,
    ) -> None:
        self._outputs.append(
            TokenOutput(
                id=answer.submit.id,
                index=answer.index,
                tokens=tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                finish=finish,
                message=message or None,
                timing=timing,
            )
        )


class AnsweringEngine(TokenEngine):
    """An engine without shared pages; each value of `_live` is a `LiveRequest`."""

    def __init__(self, options: EngineOptions | None, clock: Callable[[], float]) -> None:
        super().__init__(options, clock)
        self._running: list[Any] = []

    def _answers(self, id: str) -> dict[int, Any]:
        request = self._live.get(id)
        return request.answers if request else {}

    def _expire(self, now: float) -> None:
        """End the answers of requests whose time is over."""
        for request in list(self._live.values()):
            timeout = request.submit.timeout_s
            if timeout is not None and request.arrived + timeout <= now:
                for answer in list(request.answers.values()):
                    self._end(answer, "timeout", message=f"its time-out of {timeout:g} s")

    def _refuse_full(self, submit: Submit) -> RequestRefused | None:
        """Return the refusal of a request for which the queue has no room."""
        waiting = self.stats().waiting
        if waiting + submit.n <= self.options.max_queue:
            return None
        text = f"{waiting} answers wait; at most {self.options.max_queue} may"
        return RequestRefused(id=submit.id, reason="queue_full", text=text, retry_after_s=RETRY_SECONDS)

    def _count(self, answer: Any, token: int, *, complete: bool = False) -> Finish | None:
        """Count a new token; return the reason if it ends the answer."""
        answer.count += 1
        self._counts.generated_tokens += 1
        if complete or token in answer.submit.stop_ids:
            return "stop"
        return "length" if answer.count == answer.submit.max_tokens else None

    def _put(
        self, answer: Any, token: int, logprobs: list[TokenLogprob] | None, finish: Finish | None
    ) -> None:
        """Report a new token, and the answer's end if there is a reason for one."""
        if finish is None:
            self._tell(answer, [token], logprobs)
        else:
            self._end(answer, finish, [token], logprobs)

    def _end(
        self,
        answer: Any,
        finish: Finish,
        tokens: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
        *,
        message: str = "",
    ) -> None:
        """Forget an answer, and its request with the last one; free their memory, and report the reason."""
        request = answer.request
        del request.answers[answer.index]
        if answer in self._running:
            self._running.remove(answer)
            self._release(answer)
        if not request.answers:
            del self._live[request.submit.id]
            self._forget(request)
        self._tell(answer, tokens or [], logprobs, finish, message)

    def _release(self, answer: Any) -> None:
        """Free the memory of an answer that ran."""

    def _forget(self, request: Any) -> None:
        """Free the memory of a request without answers."""

    def _tell(
        self,
        answer: Any,
        tokens: list[int],
        logprobs: list[TokenLogprob] | None,
        finish: Finish | None = None,
        message: str = "",
    ) -> None:
        prompt, answer.prompt_logprobs = answer.prompt_logprobs, None
        timing = self._timing(answer) if finish else None
        self._report(answer, tokens, logprobs, prompt, finish, message, timing)

    def _times(self, answer: Any) -> tuple[float, float | None, float]:
        """Return when reading an answer's prompt began and ended (None if it did not), and seconds of its grammar."""
        raise NotImplementedError

    def _timing(self, answer: Any) -> Timing:
        """Return the times of an answer that ends now."""
        (begun, read, grammar_s), now = self._times(answer), self._clock()
        arrived = answer.request.arrived
        return Timing(
            queue_s=(now if read is None else begun) - arrived,
            prefill_s=0.0 if read is None else read - begun,
            decode_s=0.0 if read is None else now - read,
            grammar_s=grammar_s,
            preempted_s=0.0,
            preemptions=0,
            cached_tokens=0,
            computed_tokens=0 if read is None else len(answer.submit.ids),
            speculated_tokens=0,
            accepted_tokens=0,
        )
