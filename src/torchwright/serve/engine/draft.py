"""Speculation by a draft: it follows every step, and proposes as many tokens as are worth their rows.

Chains of proposals grow while their next tokens raise the expected tokens per second of the whole step: the measured
acceptance of proposals of that confidence against the measured cost of one more call of the draft. Of all proposals the
step then verifies as many as are worth their rows, the surest first. A draft that costs more time than it gains rests,
and is tried again later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from torchwright.models.decoder.batch import Batch, FeatureRows
from torchwright.models.decoder.cache import PAGE, PagedCache
from torchwright.models.decoder.draft import Draft
from torchwright.models.decoder.draft.plan import Worth
from torchwright.models.decoder.paged_model import PagedModel
from torchwright.serve.engine.acceptance import Acceptance
from torchwright.serve.engine.draft_calls import Chain, DraftCalls, Followed
from torchwright.serve.engine.pages import Pages
from torchwright.serve.engine.request import Sequence as Running
from torchwright.serve.engine.row_costs import RowCosts

log = logging.getLogger("torchwright.serve")

LONGEST = 8
"""Proposals of one sequence: longer chains are hardly ever accepted whole."""
JUDGED_STEPS = 64
"""Steps over which the draft's time is held against its gain."""
REST_STEPS, LONGEST_REST = 2048, 16384
"""Steps for which a draft that did not pay rests, so that trying it costs at most some 3% of the time; and twice as
many after each further trial that does not pay, up to the second, so that it costs less still."""


class Drafter:
    """Runs a draft next to an engine's decoder, over the same pages."""

    def __init__(
        self,
        draft: Draft,
        cache: PagedCache,
        pages: Pages,
        verify: RowCosts,
        costs: RowCosts,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`verify` are the costs of the decoder's rows, `costs` those of the draft's."""
        self._draft, self._calls = draft, DraftCalls(draft, cache)
        self._cache, self._pages, self._clock = cache, pages, clock
        self._verify, self._costs = verify, costs
        self._acceptance = Acceptance(), Acceptance()
        """The first is for greedy proposals, the second for drawn ones: their confidences are not comparable."""
        self._ready: dict[Running, Chain[Running]] = {}
        """The first proposals of sequences that the last step left with one missing token."""
        self._spent_s = self._gained_s = self._token_s = 0.0
        self._steps, self._tried = 0, False
        self._rest_steps, self._rests_until = REST_STEPS, 0

    @property
    def rests(self) -> bool:
        """Check whether the draft is off, because it did not pay."""
        return self._steps < self._rests_until

    def read_from(self, decoder: PagedModel) -> None:
        """Go on with a new decoder's embedding and output layer, where the draft uses the decoder's."""
        self._draft.read_from(decoder)
        self._calls = DraftCalls(self._draft, self._cache)
        self._ready.clear()

    def features(self, rows: int, like: torch.Tensor) -> FeatureRows | None:
        """Return room for what the draft reads of a step; `like` has the decoder's type, device and model size."""
        observed = self._draft.observed
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
        lag = self._draft.lag
        kept = [
            Followed(sequence, row, start, count, sequence.missing == 1 and sequence.drafted)
            for sequence, row, start in pieces
            if (count := min(sequence.cache.length, len(sequence.tokens) - lag) - start) > 0
        ]
        if not kept:
            return
        self._tried = True
        for chain in self._calls.follow(kept, batch.features):
            self._ready[chain.sequence] = chain
        self._spent_s += self._clock() - begun

    def expects(self, sequence: Running) -> float:
        """Return the expected acceptance of a sequence's next proposal."""
        ready, acceptance = self._ready.get(sequence), self._of(sequence)
        return acceptance.mean if ready is None else acceptance.of(ready.confidence[0])

    def propose(
        self, sequences: Sequence[Running], decoding: int, most: Callable[[Running], int], room: int
    ) -> None:
        """Set the proposals of sequences that the draft has followed, `room` rows at most in all.

        Proposals that others of them have already are part of this room. `decoding` sequences have a row in the next
        step in any case; `most` says how many each may get.
        """
        begun, verify = self._clock(), self._verify
        self._token_s = verify(decoding) / max(1, decoding)
        chains = [self._ready.get(sequence) or Chain(sequence) for sequence in sequences]
        chains = [chain for chain in chains if chain.tokens or not self._draft.lag]
        self._hold(chains, most, room)
        chains = [chain for chain in chains if chain.most > 0]
        able = {chain.sequence for chain in chains}
        room -= sum(len(sequence.proposals) for sequence in sequences if sequence not in able)
        worth = self._worth(chains, decoding)
        self._calls.grow(chains, worth)
        counts = verify.worth([chain.reaches(worth) for chain in chains], decoding, room)
        for chain, count in zip(chains, counts, strict=True):
            chain.sequence.proposals = chain.tokens[:count]
            chain.sequence.confidence = chain.confidence[:count]
        self._spent_s += max(0.0, verify(decoding + sum(counts)) - verify(decoding))
        self._spent_s += self._clock() - begun

    def learn(self, sequence: Running, proposed: int, accepted: int) -> None:
        """Count what became of a sequence's proposals."""
        self._of(sequence).learn(sequence.confidence[:proposed], accepted)
        self._gained_s += accepted * self._token_s

    def begins_to_rest(self) -> bool:
        """Count a step; every so many, hold the draft's time and that of its rows against its gain.

        True where it rests from now on, because it lost.
        """
        self._steps += 1
        if self._steps % JUDGED_STEPS:
            return False
        loses = self._tried and not self.rests and self._gained_s < self._spent_s
        if loses:
            self._rest()
        elif self._tried:
            self._rest_steps = REST_STEPS
        # What was before counts half: by chance 64 steps of a draft that pays may lose, and resting is long.
        kept = 0.0 if self.rests else 0.5
        self._spent_s, self._gained_s = kept * self._spent_s, kept * self._gained_s
        self._tried = False
        return loses

    def _of(self, sequence: Running) -> Acceptance:
        return self._acceptance[sequence.chooser.is_random]

    def _hold(self, chains: Sequence[Chain[Running]], most: Callable[[Running], int], room: int) -> None:
        """Say how long each chain may become, and reserve its slots, where there are pages for them."""
        for chain in chains:
            sequence = chain.sequence
            chain.most = max(0, min(most(sequence), room, LONGEST))
            if not chain.most:
                continue
            need = self._pages.need(sequence, chain.most)
            if need > self._pages.available:
                # The pages that it has may hold some, unless another sequence reads the last one as well.
                left = len(sequence.cache.pages) * PAGE - sequence.cache.length
                chain.most = min(chain.most, left) if self._pages.need(sequence, min(1, left)) == 0 else 0
                continue
            self._pages.reserve(need)
            self._cache.hold(sequence.cache, chain.most)

    def _worth(self, chains: Sequence[Chain[Running]], decoding: int) -> Worth:
        """Return what more proposals of these chains cost and bring, their first ones counted where they are known."""
        verify, draft, count = self._verify, self._costs, len(chains)
        rows = decoding + sum(len(chain.tokens) for chain in chains)
        known = sum(self._of(chain.sequence).of(sure) for chain in chains for sure in chain.confidence)
        tokens, seconds = decoding + known, verify(rows)
        call_s = [
            draft(n) + max(0.0, verify(rows + n) - verify(rows)) if n else 0.0 for n in range(count + 1)
        ]
        # Leaving a chain out of a call saves what one row of the call costs.
        row_s = max(0.0, draft(count) - draft(1)) / (count - 1) if count > 1 else 0.0
        return Worth(
            acceptance=[acceptance.table() for acceptance in self._acceptance],
            call_s=call_s,
            tokens=tokens,
            seconds=seconds,
            row=row_s * tokens / seconds,
        )

    def _rest(self) -> None:
        log.info(
            "the draft rests for %d steps: %.3f s spent, %.3f s gained",
            self._rest_steps,
            self._spent_s,
            self._gained_s,
        )
        self._rests_until = self._steps + self._rest_steps
        self._rest_steps = min(LONGEST_REST, 2 * self._rest_steps)
        self._ready.clear()
