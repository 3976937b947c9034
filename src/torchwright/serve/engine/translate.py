"""The engine of encoder-decoder text models: sources in, batched answers out.

A source is encoded once, when its turn comes; its answers share the encoder's keys and values. From then on a step
gives each answer one token. Pages for whole answers are reserved before they begin, so no answer waits for another.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from torchwright.core.errors import ModelError, WorkloadError
from torchwright.models.decoder.cache import PAGE, CacheSequence, PagedCache
from torchwright.models.decoder.memory import Memory
from torchwright.models.decoder.scores import Logits
from torchwright.models.decoder.seq2seq.translator import LoadedSeq2Seq
from torchwright.serve.engine.admission import Bounds, refuse
from torchwright.serve.engine.answering import AnsweringEngine, LiveAnswer, LiveRequest
from torchwright.serve.engine.fingerprint import fingerprint
from torchwright.serve.engine.invariance import require_invariance
from torchwright.serve.engine.memory import page_bytes, page_count
from torchwright.serve.engine.request import Key, order
from torchwright.serve.engine.sampling import Chooser, logprob
from torchwright.serve.options import EngineOptions
from torchwright.serve.wire.messages import EngineReady, RequestRefused, Stats, StepOutput, Submit


@dataclass(eq=False, kw_only=True)
class _Source(LiveRequest):
    """A request, and what is remembered of its text."""

    memory: CacheSequence | None = None
    begun: float = 0.0
    """When it was read."""
    read: float = 0.0
    """When that was done."""

    @property
    def answer_pages(self) -> int:
        """The largest number of pages that one answer takes."""
        return -(-self.submit.max_tokens // PAGE)


@dataclass(eq=False, kw_only=True)
class _Answer(LiveAnswer):
    request: _Source
    cache: CacheSequence
    last: int


class TranslatingEngine(AnsweringEngine):
    """One model's requests; `serve_decoder` runs it as it does a `ServingEngine`.

    Raises `WorkloadError` where `deterministic` is asked of a model that cannot compute so, and where the memory is too
    little for one request.
    """

    grammars = None
    """It keeps to none."""

    def __init__(
        self,
        loaded: LoadedSeq2Seq,
        *,
        options: EngineOptions | None = None,
        notices: tuple[str, ...] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(options, clock)
        self.loaded, options = loaded, self.options
        require_invariance(
            loaded.decoder, asked=options.deterministic
        )  # whose layers are made as the encoder's
        config = loaded.decoder.config
        self.context, self.answer = loaded.encoder.config.context, config.context
        """Tokens of a source and of an answer at most."""
        pages = page_count(
            config,
            loaded.kv_dtype,
            context=self.context + self.answer,
            max_running=options.max_running,
            kv_memory=options.kv_memory,
        )
        self._source_pages = max(1, pages * self.context // (self.context + self.answer))
        self._answer_pages = max(1, pages - self._source_pages)
        self.context = min(self.context, self._source_pages * PAGE)
        self.answer = min(self.answer, self._answer_pages * PAGE)
        self._memory = Memory(loaded.decoder, pages=self._source_pages, dtype=loaded.kv_dtype)
        self._cache = PagedCache(config, pages=self._answer_pages, dtype=loaded.kv_dtype)
        self._bounds = Bounds(
            vocabulary=config.vocabulary,
            context=self.answer + 1,
            pages=pages + 1,
            max_running=options.max_running,
            max_queue=options.max_queue,
        )
        self._allowed = torch.ones(config.vocabulary, dtype=torch.bool)
        self._allowed[list(loaded.rules.banned)] = False
        self._waiting: list[tuple[Key, _Source]] = []
        self._taken = [0, 0]
        """Pages of sources, and those that are kept for answers."""
        self.ready = self._ready(notices)

    def submit(self, submit: Submit) -> RequestRefused | None:
        """Take a request, or say why not."""
        refused = self._refusal(submit)
        if refused is not None:
            return refused
        now = self._clock()
        source = _Source(submit=submit, arrived=now)
        source.answers = {index: self._begin(source, index) for index in range(submit.n)}
        self._live[submit.id] = source
        heapq.heappush(self._waiting, (order(submit, now, next(self._numbers)), source))
        return None

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Read the sources whose turn has come, and give every running answer one token more."""
        begun = self._clock()
        self._expire(begun)
        with self._cores.counted():
            read = self._admit()
            rows = len(self._running)
            if rows:
                self._advance()
        if rows or read:
            self._counts.step(self._clock() - begun, rows + read)
        return self._reported()

    def stats(self) -> Stats:
        """Return the engine's state now."""
        return self._stats(
            running=len(self._running),
            waiting=sum(len(source.answers) for _, source in self._waiting),
            pages_used=sum(self._taken),
            pages=self._source_pages + self._answer_pages,
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every page is held by exactly those who say so."""
        sources = [source.memory for source in self._live.values() if source.memory is not None]
        self._memory.check_integrity(sources)
        self._cache.pool.check_integrity([list(answer.cache.pages) for answer in self._running])
        pages = sum(answer.request.answer_pages for answer in self._running)
        assert self._taken == [sum(len(one.pages) for one in sources), pages], "pages are miscounted"

    def close(self) -> None:
        """It has no threads of its own."""

    def _ready(self, notices: tuple[str, ...]) -> EngineReady:
        loaded, pages = self.loaded, self._source_pages + self._answer_pages
        parts = {
            **loaded.encoder.state_dict(prefix="encoder."),
            **loaded.decoder.state_dict(prefix="decoder."),
        }
        storages = {t.untyped_storage().data_ptr(): t.nbytes for t in parts.values()}
        kv = str(loaded.kv_dtype).removeprefix("torch.")
        return EngineReady(
            kind="decoder",
            vocabulary=loaded.encoder.config.vocabulary,
            context=self.context,
            answer=self.answer,
            pages=pages,
            page_tokens=PAGE,
            stop_ids=sorted(loaded.rules.stop),
            max_running=self.options.max_running,
            weight_bytes=sum(storages.values()),
            kv_bytes=pages * page_bytes(loaded.decoder.config, loaded.kv_dtype),
            fingerprint=f"{fingerprint(loaded.decoder)}-{kv}",
            notices=[*notices, *(f"not followed: {text}" for text in loaded.rules.not_followed)],
        )

    def _refusal(self, submit: Submit) -> RequestRefused | None:
        # Options as for any language model; the source and the answer have separate bounds.
        alone = msgspec.structs.replace(submit, ids=[0])
        if refused := refuse(alone, self._bounds, known=submit.id in self._live):
            return refused
        if submit.grammar is not None or submit.prompt_logprobs is not None or not submit.max_tokens:
            text = "a model with an encoder keeps to no grammar, does not score its source, and answers"
            return RequestRefused(id=submit.id, reason="invalid", text=text)
        try:
            self.loaded.check_source(submit.ids)
        except WorkloadError as error:
            return RequestRefused(id=submit.id, reason="invalid", text=str(error))
        if len(submit.ids) > self.context:
            text = f"the source has {len(submit.ids)} tokens; the server has memory for {self.context}"
            return RequestRefused(id=submit.id, reason="too_long", text=text)
        if submit.n * -(-submit.max_tokens // PAGE) > self._answer_pages:
            text = f"{submit.n} answers of {submit.max_tokens} tokens do not fit: there is memory for "
            text += f"{self._answer_pages * PAGE} (--kv-memory)"
            return RequestRefused(id=submit.id, reason="too_long", text=text)
        return self._refuse_full(submit)

    def _begin(self, source: _Source, index: int) -> _Answer:
        return _Answer(
            request=source,
            index=index,
            # As `generate` does: penalties count the answer alone, which may be in another language.
            chooser=Chooser(source.submit, index, prompt=()),
            cache=self._cache.sequence(0),
            last=self.loaded.rules.start,
        )

    def _admit(self) -> int:
        """Read sources in their order while there are places and pages, and tokens in the step; says how many."""
        chosen, tokens = list[_Source](), 0
        while self._waiting and tokens < self.options.step_tokens:
            source = self._waiting[0][1]
            pages = -(-len(source.submit.ids) // PAGE), len(source.answers) * source.answer_pages
            fits = (
                len(self._running) + len(source.answers) <= self.options.max_running
                and self._taken[0] + pages[0] <= self._source_pages
                and self._taken[1] + pages[1] <= self._answer_pages
            )
            if not fits:
                break
            heapq.heappop(self._waiting)
            chosen.append(source)
            tokens += len(source.submit.ids)
            self._taken = [self._taken[0] + pages[0], self._taken[1] + pages[1]]
            self._running += source.answers.values()
            source.begun = self._clock()
        found = self.loaded.remember(self._memory, [source.submit.ids for source in chosen]) if chosen else []
        for source, memory in zip(chosen, found, strict=True):
            source.memory, source.read = memory, self._clock()
        self._counts.prompt_tokens += tokens
        return tokens

    def _advance(self) -> None:
        """One token more for every running answer."""
        running, rules = list(self._running), self.loaded.rules
        rows = []
        for answer in running:
            memory = answer.request.memory
            assert memory is not None, "its source was read"
            rows.append((answer.cache, answer.last, memory))
        logits = self.loaded.advance(self._cache, self._memory, rows)
        for row, answer in enumerate(running):
            submit = answer.submit
            forced = rules.forced(answer.count, submit.max_tokens)
            try:
                token = self._choose(answer, logits, row) if forced is None else forced
            except ModelError as error:
                self._end(answer, "error", message=str(error))
                continue
            scored = None
            if submit.logprobs is not None:
                scored = [logprob(logits.row(row)[0], token, submit.logprobs, submit.logprob_ids)]
            if forced is None:  # a forced token is not sampled, and no penalty counts it: as in `generate`
                answer.chooser.accept(token)
            answer.last = token
            self._put(answer, token, scored, self._count(answer, token))

    def _choose(self, answer: _Answer, logits: Logits, row: int) -> int:
        return answer.chooser.choose(*logits.row(row), self._allowed if self.loaded.rules.banned else None)

    def _release(self, answer: _Answer) -> None:
        self._cache.free(answer.cache)
        self._taken[1] -= answer.request.answer_pages

    def _forget(self, request: _Source) -> None:
        if request.memory is None:
            self._waiting = [entry for entry in self._waiting if entry[1] is not request]
            heapq.heapify(self._waiting)
        else:
            self._taken[0] -= len(request.memory.pages)
            self._memory.free(request.memory)

    def _times(self, answer: _Answer) -> tuple[float, float | None, float]:
        source = answer.request
        return source.begun, None if source.memory is None else source.read, 0.0
