"""Speculation by a draft: it follows every step, and proposes as many tokens as are worth their rows.

A chain of proposals grows while its next token raises the expected tokens per second of the whole step: the measured
acceptance of proposals of that confidence against the measured cost of one more row and of one more call of the draft.
A draft that costs more time than it gains rests, and is tried again later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from torchwright.models.decoder.batch import Batch, FeatureRows
from torchwright.models.decoder.cache import PagedCache
from torchwright.models.decoder.draft import Draft
from torchwright.models.decoder.paged_model import PagedModel
from torchwright.serve.engine.acceptance import Acceptance, RowCosts
from torchwright.serve.engine.pages import Pages
from torchwright.serve.engine.request import Sequence as Running

log = logging.getLogger("torchwright.serve")

LONGEST = 8
"""Proposals of one sequence: longer chains are hardly ever accepted whole."""
DRAWN_FROM = 64
"""The draft's likeliest tokens among which a proposal is drawn: at temperature 1 others are drawn once in ten tokens or
less, and are rarely right."""
MEASURED_ROWS = (1, 2, 4, 8, 16)
"""Rows whose cost is measured when the engine starts; steps of decoding sequences have few."""
JUDGED_STEPS = 64
"""Steps over which the draft's time is held against its gain."""
REST_STEPS = 2048
"""Steps for which a draft that did not pay rests, so that trying it costs at most some 3% of the time."""


class DraftCosts(NamedTuple):
    """Measured costs of the decoder that verifies, and of the draft."""

    verify: RowCosts
    draft: RowCosts


@dataclass(eq=False)
class Chain:
    """The proposals of one sequence as they grow."""

    sequence: Running
    most: int
    reach: float = 1.0
    """Probability that all proposals so far are accepted."""
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    next: tuple[int, float] | None = None
    """The draft's next token and its confidence, where they are known."""
    state_E: torch.Tensor | None = None
    """The draft's hidden state that they came from."""


class Drafter:
    """Runs a draft next to an engine's decoder, over the same pages."""

    def __init__(
        self,
        draft: Draft,
        cache: PagedCache,
        pages: Pages,
        costs: DraftCosts,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.draft = draft
        self._cache, self._pages, self._costs, self._clock = cache, pages, costs, clock
        self._acceptance = Acceptance(), Acceptance()
        """The first is for greedy proposals, the second for drawn ones: their confidences are not comparable."""
        self._ready: dict[Running, Chain] = {}
        """The first proposals of sequences that the last step left with one missing token."""
        self._spent_s = self._gained_s = self._token_s = 0.0
        self._steps, self._tried = 0, False
        self._rests_until = 0

    @property
    def rests(self) -> bool:
        """Check whether the draft is off, because it did not pay."""
        return self._steps < self._rests_until

    def features(self, rows: int, like: torch.Tensor) -> FeatureRows | None:
        """Return room for what the draft reads of a step; `like` has the decoder's type, device and model size."""
        observed = self.draft.observed
        if not observed:
            return None
        return FeatureRows(observed, like.new_empty(rows, len(observed) * like.shape[-1]))

    def follow(self, batch: Batch, pieces: Iterable[tuple[Running, int, int]]) -> None:
        """Give the draft the tokens of a step; a piece is a sequence, its first row, and its first token's place.

        Called when the step's tokens have been accepted or thrown away. The draft's keys lie in slots that the decoder
        has filled, so that only rows whose following token is known count.
        """
        begun = self._clock()
        self._ready.clear()
        lag = self.draft.lag
        kept = [
            (sequence, row, start, count)
            for sequence, row, start in pieces
            if (count := min(sequence.cache.length, len(sequence.tokens) - lag) - start) > 0
        ]
        if not kept:
            return
        self._tried = True
        hidden_TE = self.draft(_rows_of(batch, kept, lag), *self._states(batch, kept), self._cache.draft)
        if lag:
            self._begin(kept, hidden_TE)
        self._spent_s += self._clock() - begun

    def expects(self, sequence: Running) -> float:
        """Return the expected acceptance of a sequence's next proposal."""
        ready = self._ready.get(sequence)
        known = ready.next if ready else None
        acceptance = self._of(sequence)
        return acceptance.mean if known is None else acceptance.of(known[1])

    def propose(
        self, sequences: Sequence[Running], decoding: int, most: Callable[[Running], int], room: int
    ) -> None:
        """Set the proposals of sequences that the draft has followed, `room` rows at most in all.

        `decoding` sequences have a row in the next step in any case; `most` says how many each may get.
        """
        begun, costs = self._clock(), self._costs
        rows = decoding
        chains = [self._ready.get(sequence) or Chain(sequence, 0) for sequence in sequences]
        for chain in chains:
            chain.most = min(most(chain.sequence), LONGEST)
        chains = [chain for chain in chains if chain.most > 0 and (chain.next or not self.draft.lag)]
        tokens, seconds = float(rows), costs.verify(rows)
        self._token_s = seconds / max(1, rows)
        growing, depth = list(chains), 0
        while growing and room > 0 and depth < LONGEST:
            if growing[0].next is None:
                cost = costs.draft(len(growing))
                gain = sum(chain.reach * self._of(chain.sequence).mean for chain in growing)
                more = costs.verify(rows + len(growing)) - costs.verify(rows)
                if gain * seconds <= (cost + more) * tokens or not self._hold(growing, depth):
                    break
                self._step(growing, depth)
                seconds += cost
            growing = [chain for chain in growing if chain.next is not None]
            for chain in sorted(growing, key=self._value, reverse=True):
                value = self._value(chain)
                cost = max(0.0, costs.verify(rows + 1) - costs.verify(rows))
                if room <= 0 or value * seconds <= cost * tokens:
                    growing.remove(chain)
                    continue
                assert chain.next is not None
                token, confidence = chain.next
                chain.tokens.append(token)
                chain.confidence.append(confidence)
                chain.reach, chain.next = value, None
                tokens, seconds, rows, room = tokens + value, seconds + cost, rows + 1, room - 1
                if len(chain.tokens) >= chain.most:
                    growing.remove(chain)
            depth += 1
        for chain in chains:
            chain.sequence.proposals, chain.sequence.confidence = chain.tokens, chain.confidence
        self._judge(self._clock() - begun, decoding, sum(len(chain.tokens) for chain in chains))

    def learn(self, sequence: Running, proposed: int, accepted: int) -> None:
        """Count what became of a sequence's proposals."""
        self._of(sequence).learn(sequence.confidence[:proposed], accepted)
        self._gained_s += accepted * self._token_s

    def _value(self, chain: Chain) -> float:
        """Return the expected tokens that a chain's next proposal adds."""
        assert chain.next is not None
        return chain.reach * self._of(chain.sequence).of(chain.next[1])

    def _of(self, sequence: Running) -> Acceptance:
        return self._acceptance[sequence.chooser.is_random]

    def _begin(self, kept: list[tuple[Running, int, int, int]], hidden_TE: torch.Tensor) -> None:
        """Keep the first proposal of each sequence that lacks its newest token alone."""
        end, ends, sequences = 0, [], []
        for sequence, _, _, count in kept:
            end += count
            if sequence.missing == 1 and sequence.drafted:
                sequences.append(sequence)
                ends.append(end - 1)
        if not sequences:
            return
        last_NE = hidden_TE[torch.tensor(ends, device=hidden_TE.device)]
        for sequence, guess, state_E in zip(
            sequences, self._guesses(sequences, last_NE, 0), last_NE, strict=True
        ):
            self._ready[sequence] = Chain(sequence, 0, next=guess, state_E=state_E)

    def _guesses(
        self, sequences: Sequence[Running], hidden_NE: torch.Tensor, ahead: int
    ) -> list[tuple[int, float]]:
        """Return a proposal for the place `ahead` of each sequence's next one, and the confidence in it."""
        some = any(sequence.chooser.is_random for sequence in sequences)
        found = self.draft.likeliest(hidden_NE, DRAWN_FROM if some else 1)
        return [
            sequence.chooser.guess(tokens_K, logprob_K, ahead)
            for sequence, tokens_K, logprob_K in zip(sequences, *found, strict=True)
        ]

    def _hold(self, chains: list[Chain], depth: int) -> bool:
        """Reserve slots for another token of each chain, where there are pages for it."""
        need = sum(self._pages.need(chain.sequence, depth + 1) for chain in chains)
        if need > self._pages.available:
            return False
        self._pages.reserve(need)
        for chain in chains:
            self._cache.hold(chain.sequence.cache, depth + 1)
        return True

    def _step(self, chains: list[Chain], depth: int) -> None:
        """Compute each chain's token at `depth` from the one before it."""
        pieces = [
            (chain.sequence.cache, chain.tokens[-1] if chain.tokens else chain.sequence.tokens[-1])
            for chain in chains
        ]
        states = [chain.state_E for chain in chains if chain.state_E is not None]
        states_BE = torch.stack(states) if states and self.draft.lag else None
        hidden_BE = self.draft(
            self._cache.ahead(pieces, depth - self.draft.lag), states_BE, self._cache.draft
        )
        guesses = self._guesses([chain.sequence for chain in chains], hidden_BE, depth)
        for chain, guess, state_E in zip(chains, guesses, hidden_BE, strict=True):
            chain.next, chain.state_E = guess, state_E

    def _states(self, batch: Batch, kept: list[tuple[Running, int, int, int]]) -> tuple[torch.Tensor | None]:
        if batch.features is None:
            return (None,)
        return (batch.features.values_TF[_row_numbers(kept, batch.ids_T.device)],)

    def _judge(self, seconds: float, sequences: int, proposed: int) -> None:
        """Hold the draft's time and that of its rows against its gain, and let it rest where it does not pay."""
        costs = self._costs.verify
        self._spent_s += seconds + max(0.0, costs(sequences + proposed) - costs(sequences))
        self._steps += 1
        if self._steps % JUDGED_STEPS:
            return
        if self._tried and self._gained_s < self._spent_s and not self.rests:
            self._rests_until = self._steps + REST_STEPS
            log.info(
                "the draft rests for %d steps: %.3f s spent, %.3f s gained",
                REST_STEPS,
                self._spent_s,
                self._gained_s,
            )
        # What was before counts half: by chance 64 steps of a draft that pays may lose, and resting is long.
        kept = 0.0 if self.rests else 0.5
        self._spent_s, self._gained_s = kept * self._spent_s, kept * self._gained_s
        self._tried = False


def _rows_of(batch: Batch, kept: list[tuple[Running, int, int, int]], lag: int) -> Batch:
    """Those of a step's rows that a draft follows, with the tokens that it reads there."""
    device = batch.ids_T.device
    rows_N = _row_numbers(kept, device)
    starts = batch.query_starts.tolist()
    places = torch.tensor([starts.index(row) for _, row, _, _ in kept], device=device)
    ids = [id for sequence, _, start, count in kept for id in sequence.tokens[start + lag :][:count]]
    ends = [0]
    for _, _, _, count in kept:
        ends.append(ends[-1] + count)
    lengths = [start + count for _, _, start, count in kept]
    return replace(
        batch,
        ids_T=torch.tensor(ids, device=device),
        positions_T=batch.positions_T[rows_N],
        slots_T=batch.slots_T[rows_N],
        lengths_T=batch.lengths_T[rows_N],
        block_tables_BP=batch.block_tables_BP[places],
        query_starts=torch.tensor(ends, dtype=torch.int32, device=device),
        context_lens_B=torch.tensor(lengths, dtype=torch.int32, device=device),
        last_rows_B=torch.tensor([end - 1 for end in ends[1:]], device=device),
        axes_AT=None,
        pictures=None,
        adapted=None,
        features=None,
        states=None,
    )


def _row_numbers(kept: list[tuple[Running, int, int, int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(
        [number for _, row, _, count in kept for number in range(row, row + count)], device=device
    )


@torch.inference_mode()
def measure_costs(
    decoder: PagedModel, draft: Draft, cache: PagedCache, clock: Callable[[], float] = time.perf_counter
) -> DraftCosts:
    """Time calls of a decoder and of its draft, by rows, over an empty cache; the faster of two each."""

    def decode(rows: int) -> None:
        sequence = cache.sequence(rows)
        try:
            batch = cache.append([(sequence, [0] * rows)])
            decoder.answer(batch, cache, batch.last_rows_B)
        finally:
            cache.free(sequence)

    def propose(rows: int) -> None:
        sequences = [cache.sequence(1) for _ in range(rows)]
        try:
            batch = cache.append([(sequence, [0]) for sequence in sequences])
            like = decoder.embedding
            states = like.new_zeros(rows, len(draft.observed) * like.shape[-1]) if draft.observed else None
            draft.likeliest(draft(replace(batch, states=None), states, cache.draft), DRAWN_FROM)
        finally:
            for sequence in sequences:
                cache.free(sequence)

    def costs(call: Callable[[int], None], rows: Sequence[int]) -> RowCosts:
        seconds = []
        for count in rows:
            call(count)
            times = []
            for _ in range(2):
                begun = clock()
                call(count)
                times.append(clock() - begun)
            seconds.append(min(times))
        return RowCosts(rows, seconds)

    rows = [count for count in MEASURED_ROWS if count <= cache.pool.free]
    return DraftCosts(costs(decode, rows), costs(propose, rows))
