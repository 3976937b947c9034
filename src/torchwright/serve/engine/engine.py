"""The engine: requests go in, every step computes one batch, tokens come out. It does no input or output.

engine = ServingEngine(loaded, size=CacheSize(pages=512, running=64))
refused = engine.submit(Submit(id="a", ids=[1, 2, 3], max_tokens=16, sampling=SamplingOptions()))
while not engine.idle:
    engine.step().outputs

A step is schedule → run → choose. The scheduler says how many tokens of which sequences, and one forward call computes
them. Each sequence that has caught up chooses one more token, or several if draft tokens were accepted.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable

import torch

from torchwright.core.errors import ModelError, TorchwrightError, WorkloadError
from torchwright.models.decoder.adapters import read_adapter
from torchwright.models.decoder.axes import PromptAxes
from torchwright.models.decoder.cache import PAGE, PagedCache
from torchwright.models.decoder.draft import Draft
from torchwright.models.decoder.generation.generate import LoadedPagedModel
from torchwright.models.decoder.shown import Places, places_of
from torchwright.serve.engine.adapters import ServedAdapters
from torchwright.serve.engine.admission import Bounds, refuse
from torchwright.serve.engine.answering import TokenEngine, count_places
from torchwright.serve.engine.draft import Drafter
from torchwright.serve.engine.draft_calls import measure_draft
from torchwright.serve.engine.fingerprint import fingerprint
from torchwright.serve.engine.invariance import require_invariance
from torchwright.serve.engine.looked_up import LookedUp
from torchwright.serve.engine.memory import CacheSize
from torchwright.serve.engine.pages import Pages
from torchwright.serve.engine.pictures import EncodedPictures
from torchwright.serve.engine.prefix import PrefixTree
from torchwright.serve.engine.request import Sequence, order
from torchwright.serve.engine.row_costs import RowCosts, measure_rows
from torchwright.serve.engine.run import Runner, StepResult
from torchwright.serve.engine.sampling import Chooser
from torchwright.serve.engine.scheduler import Scheduler, StepPlan
from torchwright.serve.engine.speculate import Lookup
from torchwright.serve.grammar.masks import Grammars
from torchwright.serve.options import EngineOptions
from torchwright.serve.wire.messages import Finish, PauseMode, RequestRefused, Stats, StepOutput, Submit

log = logging.getLogger("torchwright.serve")

FINISH_WEIGHT = 0.1
"""Weight of the latest request in the mean time between two ends."""


class ServingEngine(TokenEngine):
    """One model's requests.

    A `draft` proposes tokens. `row_costs` of the model and `draft_costs` decide how many are worth proposing; they are
    measured where they are not given.

    Raises `WorkloadError` where `deterministic` is asked of a model that cannot compute so; see `invariance.py`.
    """

    def __init__(
        self,
        loaded: LoadedPagedModel,
        *,
        size: CacheSize,
        options: EngineOptions | None = None,
        draft: Draft | None = None,
        row_costs: RowCosts | None = None,
        draft_costs: RowCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(options, clock)
        self.loaded, self.size = loaded, size
        config, options, pages = loaded.config, self.options, size.pages
        require_invariance(loaded.decoder, asked=options.deterministic)
        context = min(config.context, options.max_context or config.context)
        self.context = min(context, pages * PAGE)
        """Tokens of one sequence at most, prompt and answer together."""
        self.fingerprint = self.weight_version = _fingerprint(loaded)
        self.paused = False
        """True if steps compute nothing."""
        self._bounds = Bounds(
            vocabulary=config.vocabulary,
            context=context,
            pages=pages,
            max_running=size.running,
            max_queue=options.max_queue,
        )
        self._cache = PagedCache(
            config,
            pages=pages,
            dtype=loaded.kv_dtype,
            device=loaded.device,
            states=size.running + size.copies,
            draft=draft.page_shapes if draft else (),
        )
        # Where angles depend on the prompt's length, equal tokens have unequal keys, and a cache may start afresh.
        by_length = config.varies_by_length
        tree = PrefixTree(self._cache, self.fingerprint) if options.prefix_cache and not by_length else None
        looks_up = options.speculate == "ngram" and options.speculate_rows and not by_length
        self._pages = Pages(self._cache, tree, copies=size.copies)
        if row_costs is None and (looks_up or draft):
            with loaded.on_threads():
                row_costs = measure_rows(loaded.decoder, self._cache, clock)
        self._looked_up = LookedUp(row_costs) if looks_up and row_costs else None
        self._drafter = self._follow_with(draft, row_costs, draft_costs) if draft and row_costs else None
        self._scheduler = Scheduler(self._pages, step_tokens=options.step_tokens, max_running=size.running)
        self.grammars = Grammars(loaded.folder, config.vocabulary, list(loaded.stop))
        self._runner = Runner(loaded.decoder, self._cache, self._pages, self.grammars, self._drafter)
        self._vision = loaded.vision
        self._pictures = EncodedPictures(loaded.vision) if loaded.vision else None
        self.adapters = ServedAdapters(
            lambda folder, most: read_adapter(folder, self.loaded.decoder, loaded.folder, most_bytes=most),
            options.adapter_memory,
        )
        self._loading: list[Sequence] = []
        """Sequences whose grammar is being read."""
        self._deadlines: list[tuple[float, str]] = []
        """A heap of times and ids; requests that have ended are still in it."""
        self._last_finish, self._finish_s = clock(), 1.0

    def submit(self, submit: Submit) -> RequestRefused | None:
        """Take a request, or say why not."""
        refused = refuse(submit, self._bounds, known=submit.id in self._live)
        if refused is None and submit.grammar is not None and not self.grammars.keeps(submit.grammar):
            refused = RequestRefused(
                id=submit.id, reason="invalid", text="its grammar was not sent before it"
            )
        refused = refused or self.adapters.refuse(submit)
        places, axes = None, None
        if refused is None and submit.pictures:
            try:
                places, axes = self._places(submit)
            except TorchwrightError as error:
                refused = RequestRefused(id=submit.id, reason="invalid", text=str(error))
        waiting = self._scheduler.waits + len(self._loading)
        if refused is None and waiting + submit.n > self.options.max_queue:
            refused = RequestRefused(
                id=submit.id,
                reason="queue_full",
                text=f"{waiting} sequences wait; at most {self.options.max_queue} may",
                retry_after_s=min(60.0, max(1.0, self._finish_s)),
            )
        if refused is not None:
            log.info("request %s refused: %s", submit.id, refused.text)
            return refused
        now = self._clock()
        first, *siblings = [self._sequence(submit, index, now, places, axes) for index in range(submit.n)]
        first.siblings = siblings
        self._live[submit.id] = {sequence.index: sequence for sequence in (first, *siblings)}
        if submit.timeout_s is not None:
            heapq.heappush(self._deadlines, (first.arrived + submit.timeout_s, submit.id))
        if first.constraint is None:
            self._scheduler.submit(first)
        else:
            self._loading.append(first)
        return None

    def load_weights(self, loaded: LoadedPagedModel, version: str | None = None) -> None:
        """Go on with other weights of the same model from the next step on, as training changes them.

        Called between steps, so that no step sees both. Running requests keep their tokens; what was computed of them
        and the prefix cache are let go, and are computed again: from here on they answer as if they had been submitted
        with their tokens so far. The vision encoder stays. `version` is the weights' name in answers, by default their
        fingerprint. Raises `ModelError` for another configuration, type or device, `WorkloadError` as the class does;
        then nothing has changed.
        """
        old = self.loaded
        kept = ("config", "kv_dtype", "device", "stop")
        different = [name for name in kept if getattr(loaded, name) != getattr(old, name)]
        if different:
            raise ModelError(
                f"the weights in {loaded.folder} are not of the model that runs",
                found=", ".join(f"another {name}" for name in different),
                allowed=f"other values for {old.folder}",
            )
        require_invariance(loaded.decoder, asked=self.options.deterministic)
        self._retract()
        for row in self._live.values():
            for sequence in row.values():
                if not sequence.output_sent:
                    sequence.prompt_logprobs.clear()
        self.loaded, self.fingerprint = loaded, _fingerprint(loaded)
        self.name_weights(version or self.fingerprint)
        self._pages.forget(self.fingerprint)
        self._runner.decoder = loaded.decoder
        if self._drafter is not None:
            self._drafter.read_from(loaded.decoder)

    def name_weights(self, version: str) -> None:
        """Give the weights another version; answers say which of their tokens are of which."""
        for row in self._live.values():
            for sequence in row.values():
                if sequence.new_tokens:
                    sequence.versions.append((self.weight_version, sequence.new_tokens))
        self.weight_version = version

    def pause(self, mode: PauseMode) -> None:
        """Compute nothing until `resume`; requests are taken, and time out, but none runs.

        Their pages stay with them in the mode `in_place`. With `retract` they give them up, so that the prefix cache
        can be emptied. `abort` ends all requests that there are.
        """
        self.paused = True
        if mode == "abort":
            self.cancel_all("generation is paused", "abort")
        elif mode == "retract":
            self._retract()

    def resume(self) -> None:
        """Go on computing."""
        self.paused = False

    def flush(self) -> bool:
        """Empty the prefix cache; False while sequences hold pages, when nothing changes."""
        if self._scheduler.running:
            return False
        self._pages.forget(self.fingerprint)
        return True

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Compute one batch, if any; also report the sequences that have ended since the last step."""
        begun = self._clock()
        self._expire(begun)
        self._take_loaded()
        if self.paused:
            return self._reported()
        if self._looked_up or self._drafter:
            self._propose()
        plan = self._scheduler.plan()
        self._book(plan, begun)
        self._show(plan)
        if plan.tokens:
            with self._cores.counted(), self.loaded.on_threads():
                answers = self._runner.run(plan)
            for answer in answers:
                self._take(answer)
            self._catch_up(plan)
            self._counts.step(self._clock() - begun, sum(plan.tokens.values()))
        elif self._loading and not self._outputs:
            self._wait_for(sequence.constraint for sequence in self._loading)
        return self._reported()

    def stats(self) -> Stats:
        """Return the engine's state now."""
        return self._stats(
            running=len(self._scheduler.running),
            waiting=self._scheduler.waits + len(self._loading),
            pages_used=self._bounds.pages - self._pages.available,
            pages=self._bounds.pages,
            cached=self._pages.cached,
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every page is held by exactly those who say so."""
        self._pages.check_integrity([s for row in self._live.values() for s in row.values()])

    def close(self) -> None:
        """End the engine's threads."""
        self.grammars.close()
        self.adapters.close()

    def _places(self, submit: Submit) -> tuple[Places, PromptAxes | None]:
        """Return the places of a prompt's pictures, and its positions by axis; raise `TorchwrightError`."""
        vision = self._vision
        if vision is None:
            raise WorkloadError("the model takes text alone", found=f"{len(submit.pictures)} pictures")
        places = places_of(vision, submit.ids, submit.pictures)
        axes = vision.axes(submit.ids, submit.pictures)
        if axes is not None:
            axes.check(len(submit.ids) + submit.max_tokens, self.context)
        return places, axes

    def _show(self, plan: StepPlan) -> None:
        """Encode the pictures of sequences whose prompts are computed; those that cannot be encoded end."""
        if self._pictures is None:
            return
        for sequence in list(plan.tokens):
            try:
                self._pictures.show(sequence)
            except ModelError as error:
                plan.remove(sequence)
                for one in (*sequence.siblings, sequence):
                    self._end(one, "error", message=str(error))

    def _sequence(
        self, submit: Submit, index: int, now: float, places: Places | None, axes: PromptAxes | None
    ) -> Sequence:
        tokens = list(submit.ids)
        return Sequence(
            submit=submit,
            index=index,
            key=order(submit, now, next(self._numbers)),
            arrived=now,
            tokens=tokens,
            cache=self._cache.sequence(len(tokens), axes),
            places=places,
            adapter=self.adapters.use(submit.adapter),
            chooser=Chooser(submit, index),
            constraint=self.grammars.constraint(submit),
            lookup=Lookup(tokens) if self._looked_up else None,
        )

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, id = heapq.heappop(self._deadlines)
            for sequence in list(self._answers(id).values()):
                timeout = sequence.submit.timeout_s
                if timeout is not None and sequence.arrived + timeout <= now:
                    self._end(sequence, "timeout", message=f"its time-out of {timeout:g} s")

    def _take_loaded(self) -> None:
        """Queue the sequences whose grammar has been read."""
        for sequence in list(self._loading):
            assert sequence.constraint is not None
            loading = sequence.constraint.loading
            if not loading.done():
                continue
            if fault := loading.exception():
                for one in (*sequence.siblings, sequence):
                    self._end(one, "error", message=f"the grammar cannot be read: {fault}")
            else:
                self._loading.remove(sequence)
                self._scheduler.submit(sequence)

    def _propose(self) -> None:
        """Let sequences that decode propose what may come next, the first ones first."""
        decoding = [sequence for sequence in self._scheduler.running if sequence.decodes]
        room = self.options.speculate_rows - len(decoding)
        if self._cache.states is not None:  # each may be the last, and so needs a copy of the state behind it
            room = min(room, self.size.copies)
        for sequence in decoding:
            sequence.proposals, sequence.confidence = [], []
        if self._looked_up:
            room -= self._looked_up.propose(decoding, _left, room)
        if self._drafter:
            self._propose_by_draft(self._drafter, decoding, room)
        for sequence in decoding:
            if sequence.proposals and sequence.constraint:
                sequence.proposals = sequence.constraint.accepted(sequence.proposals)

    def _propose_by_draft(self, drafter: Drafter, decoding: list[Sequence], room: int) -> None:
        undecided = [sequence for sequence in decoding if self._prefers_draft(sequence)]
        if undecided:
            room += sum(len(sequence.proposals) for sequence in undecided)
            # PyTorch's threads would keep their cores for milliseconds behind a draft's calls, and the step wait.
            with self.loaded.on_threads():
                drafter.propose(undecided, len(decoding), _left, room)
        if drafter.begins_to_rest():
            # It will not know the tokens that it does not follow, so that these sequences go on without it.
            for sequence in self._scheduler.running:
                sequence.drafted = False

    def _prefers_draft(self, sequence: Sequence) -> bool:
        """Check whether the draft's first token is more often accepted than the one that was looked up, if any."""
        assert self._drafter
        if not sequence.drafted:
            return False
        if not sequence.proposals or self._looked_up is None:
            return True
        return self._drafter.expects(sequence) > self._looked_up.expects(sequence)

    def _follow_with(self, draft: Draft, verify: RowCosts, costs: RowCosts | None) -> Drafter:
        """Measure what the draft's calls cost, unless that is known, so that it proposes as many tokens as pay."""
        loaded = self.loaded
        if loaded.config.varies_by_length:
            raise ModelError(
                f"{loaded.folder} cannot be served with a draft",
                found="angles that depend on the prompt's length, so that proposals cannot be verified",
            )
        if costs is None:
            with loaded.on_threads():
                costs = measure_draft(draft, self._cache, loaded.decoder, self._clock)
        return Drafter(draft, self._cache, self._pages, verify, costs, self._clock)

    def _book(self, plan: StepPlan, now: float) -> None:
        """Times and counts of what the plan changes and computes."""
        for sequence in plan.admitted:
            sequence.drafted = self._drafts
            if sequence.stage == "preempted":
                continue  # until it has caught up
            sequence.enter("prefill", now)
            sequence.cached_tokens = sequence.cache.length
            self._counts.prompt_tokens += len(sequence.submit.ids)
            self._counts.prefix_queries += len(sequence.submit.ids)
            self._counts.prefix_hits += sequence.cached_tokens
        for sequence in plan.preempted:
            self._preempted(sequence, now)
        for sequence, tokens in plan.tokens.items():
            sequence.computed_tokens += tokens

    def _retract(self) -> None:
        """Let every running sequence wait for its turn to be computed again."""
        now = self._clock()
        for sequence in self._scheduler.preempt_all():
            self._preempted(sequence, now)

    def _preempted(self, sequence: Sequence, now: float) -> None:
        sequence.enter("preempted", now)
        sequence.preemptions += 1
        self._counts.preemptions += 1

    def _take(self, answer: StepResult) -> None:
        """Tell a sequence's new tokens, and its end."""
        sequence, tokens = answer.sequence, answer.tokens
        if answer.joins:
            self._scheduler.join(sequence)
            sequence.drafted = self._drafts
        accepted = max(0, len(tokens) - 1)
        self._counts.generated_tokens += len(tokens)
        if answer.proposed:
            self._learn(sequence, answer.proposed, accepted)
            sequence.speculated_tokens += answer.proposed
            sequence.accepted_tokens += accepted
            self._counts.speculated_tokens += answer.proposed
            self._counts.accepted_tokens += accepted
            for counted in (sequence, self._counts):
                count_places(counted.proposed_at, answer.proposed)
                count_places(counted.accepted_at, accepted)
        if sequence.stage == "prefill":
            sequence.enter("decode", self._clock())
        if answer.finish:
            self._end(sequence, answer.finish, answer, message=answer.message)
            return
        self._tell(sequence, answer)
        if self.loaded.config.restarts_at(sequence.cache.prompt_tokens, len(sequence.tokens)):
            self._cache.free(sequence.cache)
            sequence.cache = self._cache.sequence(len(sequence.tokens), sequence.cache.axes)

    def _learn(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        """Count what became of proposals, for whoever made them."""
        if sequence.confidence and self._drafter:
            self._drafter.learn(sequence, proposed, accepted)
        elif self._looked_up:
            self._looked_up.learn(sequence, proposed, accepted)

    @property
    def _drafts(self) -> bool:
        """Check whether a draft follows sequences that begin now."""
        return self._drafter is not None and not self._drafter.rests

    def _catch_up(self, plan: StepPlan) -> None:
        """End the lost time of sequences that have made up for a preemption."""
        for sequence in plan.tokens:
            length = sequence.cache.length
            if sequence.stage == "preempted" and length >= sequence.caught_up and self._lives(sequence):
                sequence.enter("decode" if sequence.new_tokens else "prefill", self._clock())
            sequence.caught_up = max(sequence.caught_up, length)

    def _end(
        self, sequence: Sequence, finish: Finish, answer: StepResult | None = None, *, message: str = ""
    ) -> None:
        """Forget a sequence, free its pages, and tell why."""
        self.adapters.release(sequence.adapter)
        row = self._live[sequence.submit.id]
        del row[sequence.index]
        if not row:
            del self._live[sequence.submit.id]
        leader = next((one for one in row.values() if sequence in one.siblings), None)
        if leader is not None:
            leader.siblings.remove(sequence)
        elif sequence in self._loading:
            self._loading.remove(sequence)
            if sequence.siblings:
                self._loading.append(sequence.hand_over())
        else:
            heir = sequence.hand_over() if sequence.siblings else None
            self._scheduler.remove(sequence, heir)
        now = self._clock()
        self._finish_s += FINISH_WEIGHT * (now - self._last_finish - self._finish_s)
        self._last_finish = now
        self._tell(sequence, answer, finish, message)
        # --log-requests says normal ends with what the HTTP side knows of them.
        log.log(
            logging.DEBUG if finish in ("stop", "length") else logging.INFO,
            "request %s[%d] ended: %s%s; %d prompt tokens, %d new in %.3f s",
            sequence.submit.id,
            sequence.index,
            finish,
            f", {message}" if message else "",
            len(sequence.submit.ids),
            sequence.new_tokens,
            now - sequence.arrived,
        )

    def _tell(
        self,
        sequence: Sequence,
        answer: StepResult | None,
        finish: Finish | None = None,
        message: str = "",
    ) -> None:
        submit, prompt = sequence.submit, None
        tokens = answer.tokens if answer else []
        if sequence.index == 0 and submit.prompt_logprobs is not None and not sequence.output_sent:
            prompt = sequence.prompt_logprobs
            whole = len(submit.ids) - submit.prompt_logprobs_from
            prompt = prompt if len(prompt) == whole else None
        sequence.output_sent = True
        timing = sequence.timing(self._clock(), self.weight_version) if finish else None
        logprobs = answer.logprobs if answer else None
        self._report(sequence, tokens, logprobs, prompt, finish, message, timing)

    def _answers(self, id: str) -> dict[int, Sequence]:
        return self._live.get(id, {})

    def _lives(self, sequence: Sequence) -> bool:
        return self._answers(sequence.submit.id).get(sequence.index) is sequence


def _left(sequence: Sequence) -> int:
    """The tokens that a sequence may get behind its next one."""
    return sequence.submit.max_tokens - sequence.new_tokens - 1


def _fingerprint(loaded: LoadedPagedModel) -> str:
    return f"{fingerprint(loaded.decoder)}-{str(loaded.kv_dtype).removeprefix('torch.')}"
