"""The calls of a draft over an engine's pages: each token in Python, or a chain as one operator.

Both propose the same tokens, up to the rounding of confidences; drafts that no plan describes and long prompts take the
first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from torchwright.models.decoder.batch import FeatureRows
from torchwright.models.decoder.cache import CacheSequence, PagedCache
from torchwright.models.decoder.draft import Draft
from torchwright.models.decoder.draft.plan import DRAWN_FROM, Choice, DraftPlan, Start, Worth
from torchwright.models.decoder.paged_model import PagedModel
from torchwright.models.decoder.plan import MOST_ROWS
from torchwright.serve.engine.acceptance import class_of
from torchwright.serve.engine.row_costs import MEASURED_ROWS, RowCosts
from torchwright.serve.engine.sampling import Chooser
from torchwright.serve.wire.messages import SamplingOptions, Submit


class Drafted(Protocol):
    """A sequence as a draft sees it."""

    tokens: list[int]
    cache: CacheSequence
    chooser: Chooser


S = TypeVar("S", bound=Drafted)


@dataclass(eq=False)
class Chain(Generic[S]):
    """The proposals of one sequence as they grow."""

    sequence: S
    most: int = 0
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    state_E: torch.Tensor | None = None
    """The draft's hidden state that the last of them came from."""

    def add(self, token: int, confidence: float) -> None:
        self.tokens.append(token)
        self.confidence.append(confidence)

    @property
    def last(self) -> int:
        """The token that the next one follows."""
        return self.tokens[-1] if self.tokens else self.sequence.tokens[-1]

    def reaches(self, worth: Worth) -> list[float]:
        """Return for each proposal the probability that it is accepted, and so all before it."""
        classes = worth.acceptance[self.sequence.chooser.is_random][:-1]
        shares = (classes[class_of(confidence, len(classes))] for confidence in self.confidence)
        return list(accumulate(shares, mul))

    def reach(self, worth: Worth) -> float:
        """Return the probability that all proposals are accepted."""
        return self.reaches(worth)[-1] if self.tokens else 1.0


class Followed(NamedTuple):
    """Tokens of one sequence that the decoder has computed."""

    sequence: Any
    """A `Drafted`."""
    row: int
    """The first one's row in the decoder's batch."""
    start: int
    """Its place in the sequence."""
    count: int
    begins: bool
    """True if proposals may follow the last one."""


class DraftCalls:
    """A draft's calls over an engine's pages."""

    def __init__(self, draft: Draft, cache: PagedCache, *, planned: bool = True) -> None:
        """`planned`: let operators take the calls that they can take."""
        self.draft, self._cache = draft, cache
        self.plan = DraftPlan(draft, cache.draft) if planned and draft.unplanned is None else None
        """The operators; None where each token is computed in Python."""

    def follow(self, pieces: Sequence[Followed], features: FeatureRows | None) -> list[Chain[Any]]:
        """Give the draft tokens of a step; return the first proposals of the sequences that begin."""
        lag = self.draft.lag
        batch = self._cache.at(
            [
                (piece.sequence.cache, piece.sequence.tokens[piece.start + lag :][: piece.count], piece.start)
                for piece in pieces
            ]
        )
        states_TX = None if features is None else _rows_of(features.values_TF, pieces)
        ends, end = list[int](), 0
        for piece in pieces:
            end += piece.count
            if piece.begins and lag:
                ends.append(end - 1)
        chains = [Chain(piece.sequence) for piece in pieces if piece.begins and lag]
        if self.plan is not None and len(batch.ids_T) <= MOST_ROWS:
            choices = [_choice(chain, 0, 1) for chain in chains]
            states_NE, tokens, confidence = self.plan.follow(batch, states_TX, ends, choices)
            for chain, token, sure, state_E in zip(chains, tokens, confidence, states_NE, strict=True):
                chain.add(token, sure)
                chain.state_E = state_E
            return chains
        hidden_TE = self.draft(batch, states_TX, self._cache.draft)
        if chains:
            self._guess(chains, hidden_TE[torch.tensor(ends, device=hidden_TE.device)], 0)
        return chains

    def grow(self, chains: Sequence[Chain[Any]], worth: Worth) -> None:
        """Add tokens to chains, all of which have as many, while they are worth their time."""
        if not chains:
            return
        if self.plan is None:
            self._grow(chains, worth)
            return
        first, lag = len(chains[0].tokens), self.draft.lag
        starts = [
            Start(
                token=chain.last,
                place=chain.sequence.cache.length + first - lag,
                pages=chain.sequence.cache.pages,
                most=chain.most - first,
                reach=chain.reach(worth),
                choice=_choice(chain, first, chain.most - first),
            )
            for chain in chains
        ]
        if not any(start.most for start in starts):
            return
        states = [chain.state_E for chain in chains if chain.state_E is not None]
        states_BE = torch.stack(states) if lag else None
        for chain, found in zip(chains, self.plan.grow(starts, states_BE, worth), strict=True):
            for token, confidence in found:
                chain.add(token, confidence)

    def _grow(self, chains: Sequence[Chain[Any]], worth: Worth) -> None:
        tokens, seconds = worth.tokens, worth.seconds
        growing = [chain for chain in chains if len(chain.tokens) < chain.most]
        while growing:
            gain = sum(
                chain.reach(worth) * worth.acceptance[chain.sequence.chooser.is_random][-1]
                for chain in growing
            )
            cost = worth.call_s[len(growing)]
            if gain * seconds <= cost * tokens:
                return
            tokens, seconds = tokens + gain, seconds + cost
            self._step(growing)
            growing = [
                chain
                for chain in growing
                if len(chain.tokens) < chain.most and chain.reach(worth) > worth.row
            ]

    def _step(self, chains: Sequence[Chain[Any]]) -> None:
        """Compute each chain's next token from its last one."""
        ahead, lag = len(chains[0].tokens), self.draft.lag
        batch = self._cache.ahead([(chain.sequence.cache, chain.last) for chain in chains], ahead - lag)
        states = [chain.state_E for chain in chains if chain.state_E is not None]
        states_BE = torch.stack(states) if lag else None
        self._guess(chains, self.draft(batch, states_BE, self._cache.draft), ahead)

    def _guess(self, chains: Sequence[Chain[Any]], hidden_NE: torch.Tensor, ahead: int) -> None:
        """Add a proposal to each chain, for the place `ahead` of its sequence's next one."""
        some = any(chain.sequence.chooser.is_random for chain in chains)
        found = self.draft.likeliest(hidden_NE, DRAWN_FROM if some else 1)
        for chain, tokens_K, logprob_K, state_E in zip(chains, *found, hidden_NE, strict=True):
            chain.add(*chain.sequence.chooser.guess(tokens_K, logprob_K, ahead))
            chain.state_E = state_E


def _choice(chain: Chain[Any], ahead: int, count: int) -> Choice:
    chooser = chain.sequence.chooser
    return Choice(chooser.sampling, chooser.keys(ahead, count))


def _rows_of(values_TF: torch.Tensor, pieces: Sequence[Followed]) -> torch.Tensor:
    """The rows of the pieces; those of a single one are a view."""
    if len(pieces) == 1:
        return values_TF[pieces[0].row :][: pieces[0].count]
    numbers = [number for _, row, _, count, _ in pieces for number in range(row, row + count)]
    return values_TF[torch.tensor(numbers, device=values_TF.device)]


@dataclass(eq=False)
class _Probe:
    """A sequence whose calls are timed."""

    tokens: list[int]
    cache: CacheSequence
    chooser: Chooser


@torch.inference_mode()
def measure_draft(
    draft: Draft, cache: PagedCache, decoder: PagedModel, clock: Callable[[], float] = time.perf_counter
) -> RowCosts:
    """Time a draft's calls by the sequences that it proposes for, over an empty cache of this decoder."""
    calls, like = DraftCalls(draft, cache), decoder.embedding
    drawn = Submit(id="costs", ids=[0], max_tokens=8, sampling=SamplingOptions(temperature=1.0))
    worth = Worth(
        acceptance=[[1.0, 1.0]] * 2, call_s=[0.0] * (max(MEASURED_ROWS) + 1), tokens=1, seconds=1, row=0
    )

    def propose(rows: int) -> None:
        sequences = [cache.sequence(1) for _ in range(rows)]
        try:
            cache.extend([(sequence, 1) for sequence in sequences])
            for sequence in sequences:
                cache.hold(sequence, 2)
            chains = [
                Chain(_Probe([0], sequence, Chooser(drawn, 0)), most=draft.lag + 1) for sequence in sequences
            ]
            for chain in chains[: len(chains) * draft.lag]:
                chain.add(0, 1.0)
                chain.state_E = like.new_zeros(draft.width)
            calls.grow(chains, worth)
        finally:
            for sequence in sequences:
                cache.free(sequence)

    return RowCosts.measured(propose, cache.pool.free, clock)
