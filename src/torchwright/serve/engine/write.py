"""The engine of models that compute one answer at a time: calls of fixed shapes, and transformers' own code.

Each answer has its own cache and is computed by itself, one token a step, so that it is the same in any company.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from torchwright.core.errors import ModelError, TorchwrightError, WorkloadError, first_line
from torchwright.hardware.devices.cpu import available_memory_bytes
from torchwright.models.decoder.shown import Shown, places_of
from torchwright.models.decoder.transformers_backend.writer import TransformersWriter
from torchwright.serve.engine.admission import Bounds, refuse
from torchwright.serve.engine.answering import AnsweringEngine, LiveAnswer, LiveRequest
from torchwright.serve.engine.fingerprint import fingerprint_of_files
from torchwright.serve.engine.request import Key, order
from torchwright.serve.engine.sampling import Chooser, logprob
from torchwright.serve.grammar.masks import Constraint, Grammars
from torchwright.serve.options import KV_SHARE, EngineOptions, check_context
from torchwright.serve.wire.messages import (
    EngineReady,
    RequestRefused,
    Stats,
    StepOutput,
    Submit,
)
from torchwright.workloads.generation import Continued, SteppedWriter


@dataclass(eq=False, kw_only=True)
class _Request(LiveRequest):
    """A request, with its pictures once they are encoded."""

    shown: Shown | None = None


@dataclass(eq=False, kw_only=True)
class _Answer(LiveAnswer):
    """One of a request's `n` answers; without a session it waits."""

    request: _Request
    key: Key
    constraint: Constraint | None
    session: Continued | None = None
    logits_V: torch.Tensor | None = None
    """Those of the next token."""
    begun: float = 0.0
    read: float = 0.0

    @property
    def loading(self) -> bool:
        return self.constraint is not None and not self.constraint.loading.done()


class WritingEngine(AnsweringEngine):
    """One model's requests; `serve_decoder` runs it as it does a `ServingEngine`."""

    def __init__(
        self,
        generator: SteppedWriter,
        folder: Path,
        *,
        tokenizer: Path,
        options: EngineOptions | None = None,
        notices: tuple[str, ...] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`folder` holds the weights, and `tokenizer` the tokenizer's files."""
        super().__init__(options, clock)
        self._generator = generator
        self._writer: TransformersWriter | None = None
        """The same, if it takes pictures."""
        if isinstance(generator, TransformersWriter) and generator.vision is not None:
            self._writer = generator
        longest = generator.longest
        check_context(self.options.max_context, longest)
        self.context = self.options.max_context or longest
        self._at_once = self._room()
        self._bounds = Bounds(
            vocabulary=generator.vocabulary,
            context=self.context,
            pages=self._at_once * longest,
            max_running=self.options.max_running,
            max_queue=self.options.max_queue,
        )
        self.grammars = Grammars(tokenizer, generator.vocabulary, list(generator.stop))
        self._waiting: list[tuple[Key, _Answer]] = []
        """A heap; answers that have ended are still in it."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        self.ready = EngineReady(
            kind="decoder",
            vocabulary=generator.vocabulary,
            context=self.context,
            chunk=generator.chunk,
            pages=self._at_once,
            page_tokens=longest,
            stop_ids=sorted(generator.stop),
            max_running=self._at_once,
            weight_bytes=sum(path.stat().st_size for path in files if path.suffix == ".safetensors"),
            kv_bytes=self._at_once * generator.cache_bytes,
            fingerprint=fingerprint_of_files(files),
            pictures=self._writer is not None,
            notices=list(notices),
        )

    def submit(self, submit: Submit) -> RequestRefused | None:
        """Take a request, or say why not."""
        refused = self._refusal(submit)
        if refused is not None:
            return refused
        now = self._clock()
        request = self._live[submit.id] = _Request(submit=submit, arrived=now)
        for index in range(submit.n):
            answer = request.answers[index] = _Answer(
                request=request,
                index=index,
                key=order(submit, now, next(self._numbers)),
                chooser=Chooser(submit, index),
                constraint=self.grammars.constraint(submit),
            )
            heapq.heappush(self._waiting, (answer.key, answer))
        return None

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Give each running answer one token; also report the answers that have ended since the last step."""
        begun = self._clock()
        self._expire(begun)
        self._admit()
        with self._cores.counted():
            for answer in list(self._running):
                self._advance(answer)
        if self._running:
            self._counts.step(self._clock() - begun, len(self._running))
        elif self._live and not self._outputs:
            self._wait_for(answer.constraint for _, answer in self._waiting)
        return self._reported()

    def stats(self) -> Stats:
        """Return the engine's state now."""
        running = len(self._running)
        waiting = sum(len(request.answers) for request in self._live.values()) - running
        return self._stats(running=running, waiting=waiting, pages_used=running, pages=self._at_once)

    def check_integrity(self) -> None:
        """Raise `AssertionError` where an answer runs that no request has."""
        live = [answer for request in self._live.values() for answer in request.answers.values()]
        assert all(answer in live for answer in self._running), "an answer runs without its request"

    def close(self) -> None:
        """End the engine's threads."""
        self.grammars.close()

    def _room(self) -> int:
        """Return how many answers run at once: what the memory for keys and values holds, and at least one."""
        memory = self.options.kv_memory
        memory = int(available_memory_bytes() * KV_SHARE) if memory is None else memory
        size = max(1, self._generator.cache_bytes)
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
        if submit.pictures and (text := self._picture_fault(submit)):
            return RequestRefused(id=submit.id, reason="invalid", text=text)
        room = self._generator.room(len(submit.ids))
        if submit.max_tokens > room:
            chunk = self._generator.chunk
            read = f", because it is read in whole chunks of {chunk}" if chunk > 1 else ""
            text = f"a prompt of {len(submit.ids)} tokens leaves room for {room} new ones{read}; "
            text += f"{submit.max_tokens} are asked for"
            return RequestRefused(id=submit.id, reason="too_long", text=text)
        return self._refuse_full(submit)

    def _picture_fault(self, submit: Submit) -> str | None:
        """Return why a request with pictures cannot be computed."""
        if self._writer is None or self._writer.vision is None:
            return "the model takes text alone"
        if submit.prompt_logprobs is not None:
            return "log-probabilities of prompts with pictures are not computed for this model"
        try:
            places_of(self._writer.vision, submit.ids, submit.pictures)
        except TorchwrightError as error:
            return str(error)
        return None

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
            ids, top, first = submit.ids, submit.prompt_logprobs, submit.prompt_logprobs_from
            logits_TV = generator(torch.tensor([ids]))[0]
            scored = zip(logits_TV[first:-1], ids[first + 1 :], strict=True)
            asked = submit.logprob_ids
            answer.prompt_logprobs = [
                None,
                *(logprob(logits_V, token, top, asked) for logits_V, token in scored),
            ]
        if self._writer is not None and submit.pictures:
            request = answer.request
            request.shown = request.shown or self._writer.show(submit.ids, submit.pictures)
            answer.session = self._writer.session(submit.ids, request.shown)
        else:
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
        scored = None
        if submit.logprobs is not None:
            scored = [logprob(logits_V, token, submit.logprobs, submit.logprob_ids)]
        finish = self._count(answer, token, complete=constraint is not None and constraint.complete)
        if finish is None:
            answer.logits_V = session.advance(token)
        self._put(answer, token, scored, finish)

    def _times(self, answer: _Answer) -> tuple[float, float | None, float]:
        read = None if answer.session is None else answer.read
        return answer.begun, read, answer.constraint.seconds if answer.constraint else 0.0

    def _lives(self, answer: _Answer) -> bool:
        return answer.request.answers.get(answer.index) is answer
