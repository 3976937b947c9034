"""The base of engines without shared pages: their live requests, what they report, and what they refuse."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchwright.serve.engine.cores import CoreShare
from torchwright.serve.options import EngineOptions
from torchwright.serve.wire.messages import (
    Cancel,
    Finish,
    Output,
    RequestRefused,
    Stats,
    Submit,
    Timing,
    TokenLogprob,
)

RETRY_SECONDS = 1.0
"""Wait that a client is advised where the queue is full."""


@dataclass(eq=False, kw_only=True)
class LiveRequest:
    """A request, and its answers that have not ended."""

    submit: Submit
    arrived: float
    answers: dict[int, Any] = field(default_factory=dict)
    """By their index."""


@dataclass
class _Counts:
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    step_s: float = 0.0
    step_tokens: int = 0


class AnsweringEngine:
    """Requests by their id, and outputs until the next step reports them."""

    def __init__(self, options: EngineOptions | None, clock: Callable[[], float]) -> None:
        self.options, self._clock = options or EngineOptions(), clock
        self._cores = CoreShare(clock, time.thread_time)
        self._live: dict[str, Any] = {}
        """Each is a `LiveRequest`."""
        self._outputs: list[Output] = []
        self._counts = _Counts()

    @property
    def idle(self) -> bool:
        """Return True if there is nothing to compute and nothing to report."""
        return not self._live and not self._outputs

    def cancel(self, cancel: Cancel) -> None:
        """End a request, or one of its answers; their memory is free when this returns. Unknown ids have ended."""
        request = self._live.get(cancel.id)
        for index, answer in list(request.answers.items()) if request else ():
            if cancel.index in (None, index):
                self._end(answer, cancel.finish, message=cancel.reason)

    def cancel_all(self, reason: str) -> None:
        """End every request."""
        for id in list(self._live):
            self.cancel(Cancel(id=id, reason=reason))

    def stats(self) -> Stats:
        """Return the engine's state now."""
        raise NotImplementedError

    def _end(self, answer: Any, finish: Finish, *, message: str = "") -> None:
        """Forget an answer, free its memory, and report the reason."""
        raise NotImplementedError

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

    def _stats(self, *, running: int, waiting: int, pages_used: int, pages: int) -> Stats:
        counts = self._counts
        return Stats(
            running=running,
            waiting=waiting,
            pages_used=pages_used,
            pages_cached=0,
            pages=pages,
            prompt_tokens=counts.prompt_tokens,
            generated_tokens=counts.generated_tokens,
            prefix_queries=0,
            prefix_hits=0,
            preemptions=0,
            speculated_tokens=0,
            accepted_tokens=0,
            steps=counts.steps,
            step_s=counts.step_s,
            step_tokens=counts.step_tokens,
            core_share=self._cores.value,
        )

    def _report(
        self,
        submit: Submit,
        index: int,
        tokens: list[int],
        logprobs: list[TokenLogprob] | None,
        *,
        prompt_logprobs: list[TokenLogprob | None] | None = None,
        finish: Finish | None = None,
        message: str = "",
        timing: Timing | None = None,
    ) -> None:
        self._outputs.append(
            Output(
                id=submit.id,
                index=index,
                tokens=tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                finish=finish,
                message=message or None,
                timing=timing,
            )
        )

    def _timing(
        self, submit: Submit, arrived: float, *, begun: float, read: float | None, grammar_s: float = 0.0
    ) -> Timing:
        """Return the times of an answer that ends now; its prompt is `read` since then, None where it is not."""
        now = self._clock()
        return Timing(
            queue_s=(now if read is None else begun) - arrived,
            prefill_s=0.0 if read is None else read - begun,
            decode_s=0.0 if read is None else now - read,
            grammar_s=grammar_s,
            preempted_s=0.0,
            preemptions=0,
            cached_tokens=0,
            computed_tokens=0 if read is None else len(submit.ids),
            speculated_tokens=0,
            accepted_tokens=0,
        )
