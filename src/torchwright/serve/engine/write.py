"""The engine of an artifact whose model runs in two calls of fixed shapes, as `torchwright generate` runs it.

Each answer has a cache of its own and is computed by itself, one token a step, so that it is the same in any company.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torchwright.artifact.folder import MODEL
from torchwright.devices.cpu import available_memory_bytes
from torchwright.errors import ModelError, TorchwrightError, WorkloadError, first_line
from torchwright.serve.engine.admission import Bounds, refuse
from torchwright.serve.engine.cores import CoreShare
from torchwright.serve.engine.fingerprint import fingerprint_of_files
from torchwright.serve.engine.request import Key, order
from torchwright.serve.engine.sampling import Chooser, logprob
from torchwright.serve.grammar.masks import Constraint, Grammars
from torchwright.serve.options import KV_SHARE, EngineOptions, check_context
from torchwright.serve.wire.messages import (
    Cancel,
    EngineReady,
    Finish,
    Output,
    RequestRefused,
    Stats,
    StepOutput,
    Submit,
    Timing,
    TokenLogprob,
)
from torchwright.workloads.generation import Generator, Session

RETRY_SECONDS = 1.0
"""After which a client is told to come again where the queue is full."""
GRAMMAR_WAIT_S = 0.02
"""A step that only waits for grammars to be read takes no longer."""


@dataclass(eq=False, kw_only=True)
class _Answer:
    """One of a request's `n` answers; without a session it waits."""

    submit: Submit
    index: int
    key: Key
    arrived: float
    chooser: Chooser
    constraint: Constraint | None
    session: Session | None = None
    logits_V: torch.Tensor | None = None
    """Those of the next token."""
    count: int = 0
    begun: float = 0.0
    read: float = 0.0
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def loading(self) -> bool:
        return self.constraint is not None and not self.constraint.loading.done()


@dataclass
class _Counts:
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    step_s: float = 0.0
    step_tokens: int = 0
    numbers: itertools.count[int] = field(default_factory=itertools.count)


class WritingEngine:
    """One model's requests; `serve_decoder` runs it as it does a `ServingEngine`."""

    def __init__(
        self,
        generator: Generator,
        artifact: Path,
        *,
        options: EngineOptions | None = None,
        notices: tuple[str, ...] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.options, self._generator, self._clock = options or EngineOptions(), generator, clock
        self._cores = CoreShare(clock, time.thread_time)
        geometry = generator.geometry
        longest = min(geometry.slots, geometry.context)
        check_context(self.options.max_context, longest)
        self.context = self.options.max_context or longest
        self._at_once = self._room()
        self._bounds = Bounds(
            vocabulary=geometry.vocabulary,
            context=self.context,
            pages=self._at_once * geometry.slots,
            max_running=self.options.max_running,
            max_queue=self.options.max_queue,
        )
        self.grammars = Grammars(artifact / MODEL, geometry.vocabulary, list(geometry.eos))
        self._live: dict[str, dict[int, _Answer]] = {}
        self._waiting: list[tuple[Key, _Answer]] = []
        """A heap; answers that have ended are still in it."""
        self._running: list[_Answer] = []
        self._outputs: list[Output] = []
        self._counts = _Counts()
        files = sorted(path for path in artifact.rglob("*") if path.is_file())
        self.ready = EngineReady(
            kind="decoder",
            vocabulary=geometry.vocabulary,
            context=self.context,
            chunk=geometry.chunk,
            pages=self._at_once,
            page_tokens=geometry.slots,
            stop_ids=sorted(geometry.eos),
            max_running=self._at_once,
            weight_bytes=sum(path.stat().st_size for path in files if path.suffix == ".safetensors"),
            kv_bytes=self._at_once * generator.cache_bytes,
            fingerprint=fingerprint_of_files(files),
            notices=list(notices),
        )

    @property
    def idle(self) -> bool:
        """True where there is nothing to compute and nothing to tell."""
        return not self._live and not self._outputs

    def submit(self, submit: Submit) -> RequestRefused | None:
        """Take a request, or say why not."""
        refused = self._refusal(submit)
        if refused is not None:
            return refused
        now, answers = self._clock(), dict[int, _Answer]()
        for index in range(submit.n):
            constraint = None
            if submit.grammar is not None:
                constraint = self.grammars.constraint(submit.grammar, submit.stop_ids)
            answers[index] = _Answer(
                submit=submit,
                index=index,
                key=order(submit, now, next(self._counts.numbers)),
                arrived=now,
                chooser=Chooser(submit, index),
                constraint=constraint,
            )
            heapq.heappush(self._waiting, (answers[index].key, answers[index]))
        self._live[submit.id] = answers
        return None

    def cancel(self, cancel: Cancel) -> None:
        """End a request, or one of its answers. Unknown ids have ended."""
        for index, answer in list(self._live.get(cancel.id, {}).items()):
            if cancel.index in (None, index):
                self._end(answer, cancel.finish, message=cancel.reason)

    def cancel_all(self, reason: str) -> None:
        """End every request."""
        for id in list(self._live):
            self.cancel(Cancel(id=id, reason=reason))

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Give each running answer one token; what has ended since the last step is told too."""
        begun = self._clock()
        self._expire(begun)
        self._admit()
        with self._cores.counted():
            for answer in list(self._running):
                self._advance(answer)
        counts = self._counts
        if self._running:
            counts.steps += 1
            counts.step_s, counts.step_tokens = self._clock() - begun, len(self._running)
        elif self._live and not self._outputs:
            loading = [answer.constraint.loading for _, answer in self._waiting if answer.constraint]
            futures.wait(loading, GRAMMAR_WAIT_S, futures.FIRST_COMPLETED)
        outputs, self._outputs = self._outputs, []
        return StepOutput(outputs=outputs, stats=self.stats())

    def stats(self) -> Stats:
        """The engine's state now."""
        counts, running = self._counts, len(self._running)
        return Stats(
            running=running,
            waiting=sum(map(len, self._live.values())) - running,
            pages_used=running,
            pages_cached=0,
            pages=self._at_once,
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

    def check_integrity(self) -> None:
        """Raise `AssertionError` where an answer runs that no request has."""
        live = [answer for answers in self._live.values() for answer in answers.values()]
        assert all(answer in live for answer in self._running), "an answer runs without its request"

    def close(self) -> None:
        """End the engine's threads."""
        self.grammars.close()

    def _room(self) -> int:
        """Return how many answers run at once: what the memory for keys and values holds, and at least one."""
        memory = self.options.kv_memory
        memory = int(available_memory_bytes() * KV_SHARE) if memory is None else memory
        size = self._generator.cache_bytes
        if self.options.kv_memory is not None and memory < size:
            raise WorkloadError(
                f"{memory} bytes for keys and values", allowed=f"at least {size}, the cache of one answer"
            )
        return max(1, min(self.options.max_running, memory // size))

    def _refusal(self, submit: Submit) -> RequestRefused | None:
        if refused := refuse(submit, self._bounds, known=submit.id in self._live):
            return refused
        if submit.grammar is not None and not self.grammars.keeps(submit.grammar):
            return RequestRefused(id=submit.id, reason="invalid", text="its grammar was not sent before it")
        room = self._generator.room(len(submit.ids))
        if submit.max_tokens > room:
            text = f"a prompt of {len(submit.ids)} tokens leaves room for {room} new ones, because it is read in "
            text += f"whole chunks of {self._generator.geometry.chunk}; {submit.max_tokens} are asked for"
            return RequestRefused(id=submit.id, reason="too_long", text=text)
        waiting = self.stats().waiting
        if waiting + submit.n > self.options.max_queue:
            text = f"{waiting} answers wait; at most {self.options.max_queue} may"
            return RequestRefused(id=submit.id, reason="queue_full", text=text, retry_after_s=RETRY_SECONDS)
        return None

    def _expire(self, now: float) -> None:
        for answers in list(self._live.values()):
            for answer in list(answers.values()):
                timeout = answer.submit.timeout_s
                if timeout is not None and answer.arrived + timeout <= now:
                    self._end(answer, "timeout", message=f"its time-out of {timeout:g} s")

    def _admit(self) -> None:
        """Begin answers in their order while there is room; those whose grammar is being read wait."""
        loading = []
        while self._waiting and len(self._running) < self._at_once:
            entry = heapq.heappop(self._waiting)
            answer = entry[1]
            if not self._lives(answer):
                continue
            if answer.loading:
                loading.append(entry)
            elif answer.constraint and (fault := answer.constraint.loading.exception()):
                self._end(answer, "error", message=f"the grammar cannot be read: {fault}")
            else:
                self._running.append(answer)
        for entry in loading:
            heapq.heappush(self._waiting, entry)

    def _advance(self, answer: _Answer) -> None:
        """Read the prompt or compute the last token, and choose the next one."""
        try:
            if answer.session is None:
                self._read(answer)
            if answer.submit.max_tokens:
                self._choose(answer)
            else:
                self._end(answer, "length")
        except TorchwrightError as error:
            self._end(answer, "error", message=str(error))
        except Exception as error:  # one answer's fault must not end the others'
            self._end(answer, "error", message=f"{type(error).__name__}: {first_line(error)}")

    def _read(self, answer: _Answer) -> None:
        submit, generator = answer.submit, self._generator
        answer.begun = self._clock()
        if submit.prompt_logprobs is not None and answer.index == 0:
            ids, top = submit.ids, submit.prompt_logprobs
            logits_TV = generator(torch.tensor([ids]))[0]
            scored = zip(logits_TV[:-1], ids[1:], strict=True)
            answer.prompt_logprobs = [None, *(logprob(logits_V, token, top) for logits_V, token in scored)]
        answer.session = generator.session(submit.ids)
        answer.logits_V = answer.session.prefill()
        answer.read = self._clock()
        self._counts.prompt_tokens += len(submit.ids)

    def _choose(self, answer: _Answer) -> None:
        submit, constraint, session = answer.submit, answer.constraint, answer.session
        logits_V = answer.logits_V
        assert session is not None
        assert logits_V is not None
        if not bool(logits_V.isfinite().all()):
            raise ModelError("the model's logits are not numbers")
        allowed_V = None
        if constraint is not None:
            allowed_V = self.grammars.fill(1, [(constraint, 0, [])]).row(0)
        if constraint is not None and constraint.fault:
            self._end(answer, "grammar", message=constraint.fault)
            return
        token = answer.chooser.choose(logits_V, None, allowed_V)
        if constraint is not None and not constraint.accept(token):
            raise ModelError(f"the grammar does not take the token {token}")
        answer.chooser.accept(token)
        answer.count += 1
        self._counts.generated_tokens += 1
        scored = None if submit.logprobs is None else [logprob(logits_V, token, submit.logprobs)]
        if token in submit.stop_ids or (constraint is not None and constraint.complete):
            self._end(answer, "stop", [token], scored)
        elif answer.count == submit.max_tokens:
            self._end(answer, "length", [token], scored)
        else:
            answer.logits_V = session.advance(token)
            self._tell(answer, [token], scored)

    def _end(
        self,
        answer: _Answer,
        finish: Finish,
        tokens: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
        *,
        message: str = "",
    ) -> None:
        """Forget an answer and tell why it ended."""
        answers = self._live[answer.submit.id]
        del answers[answer.index]
        if not answers:
            del self._live[answer.submit.id]
        if answer in self._running:
            self._running.remove(answer)
        self._tell(answer, tokens or [], logprobs, finish, message)

    def _tell(
        self,
        answer: _Answer,
        tokens: list[int],
        logprobs: list[TokenLogprob] | None,
        finish: Finish | None = None,
        message: str = "",
    ) -> None:
        prompt, answer.prompt_logprobs = answer.prompt_logprobs, None
        self._outputs.append(
            Output(
                id=answer.submit.id,
                index=answer.index,
                tokens=tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt,
                finish=finish,
                message=message or None,
                timing=self._timing(answer) if finish else None,
            )
        )

    def _timing(self, answer: _Answer) -> Timing:
        now, read = self._clock(), answer.session is not None
        return Timing(
            queue_s=(answer.begun if read else now) - answer.arrived,
            prefill_s=answer.read - answer.begun if read else 0.0,
            decode_s=now - answer.read if read else 0.0,
            grammar_s=answer.constraint.seconds if answer.constraint else 0.0,
            preempted_s=0.0,
            preemptions=0,
            cached_tokens=0,
            computed_tokens=len(answer.submit.ids) if read else 0,
            speculated_tokens=0,
            accepted_tokens=0,
        )

    def _lives(self, answer: _Answer) -> bool:
        return self._live.get(answer.submit.id, {}).get(answer.index) is answer
