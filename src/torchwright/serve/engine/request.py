"""One sequence of a request: its tokens, what of them is computed, its limits, and where its time goes.

A sequence catches up: each step computes some of the tokens that its cache lacks, and once none is missing the last
row's logits give it one more. A prompt cut into chunks, a prefix found in the tree, a recomputation after preemption
and speculated tokens are all this.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from torchwright.models.decoder.cache import CacheSequence
from torchwright.models.decoder.low_rank import Adapter
from torchwright.models.decoder.shown import Places, Shown
from torchwright.models.vision.record import Picture
from torchwright.serve.engine.sampling import Chooser
from torchwright.serve.engine.speculate import Lookup
from torchwright.serve.grammar.masks import Constraint
from torchwright.serve.wire.messages import Submit, Timing, TokenLogprob

AGEING_S = 10.0
"""One level of priority is worth so many seconds of waiting: however many come first, everything's turn comes."""
Key = tuple[float, int]
"""The order of sequences, smallest first."""
Stage = Literal["queue", "prefill", "decode", "preempted"]


@dataclass(eq=False, kw_only=True)
class Sequence:
    """One of a request's `n` sequences."""

    submit: Submit
    index: int
    key: Key
    arrived: float
    """Seconds on the engine's clock, as all times here."""
    tokens: list[int]
    """The prompt and what has been answered."""
    cache: CacheSequence
    chooser: Chooser
    constraint: Constraint | None = None
    lookup: Lookup | None = None
    places: Places | None = None
    """The places in its prompt at which pictures are."""
    shown: Shown | None = None
    """Their embeddings, while its prompt is computed."""
    adapter: Adapter | None = None
    siblings: list[Sequence] = field(default_factory=list)
    """Sequences that begin with this one's cache once it holds the prompt."""
    proposals: list[int] = field(default_factory=list)
    """Tokens that may come next; this step's rows verify them."""
    confidence: list[float] = field(default_factory=list)
    """The draft's confidence in them; empty where no draft proposed them."""
    drafted: bool = False
    """True while a draft follows it."""
    caught_up: int = 0
    """The most tokens that have ever been computed: below it everything is recomputation."""
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    cached_tokens: int | None = None
    """Prompt tokens that were found in the prefix tree; None before the first look."""
    computed_tokens: int = 0
    speculated_tokens: int = 0
    accepted_tokens: int = 0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    preemptions: int = 0
    output_sent: bool = False
    """True if any part has been sent."""
    versions: list[tuple[str, int]] = field(default_factory=list)
    """Earlier versions of the weights, and how many tokens it had when each was replaced."""
    stage: Stage = "queue"
    _edges: list[Hashable] = field(default_factory=list)
    _since: float = 0.0
    _seconds: dict[Stage, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._since = self.arrived

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - len(self.submit.ids)

    @property
    def missing(self) -> int:
        """Tokens that the cache lacks."""
        return len(self.tokens) - self.cache.length

    @property
    def edges(self) -> list[Hashable] | list[int]:
        """Its tokens as the prefix tree tells them apart: those of a picture by what it shows, the first by adapter."""
        if self.places is None and self.adapter is None:
            return self.tokens
        if not self._edges:
            self._edges = [*self.tokens[: len(self.submit.ids)]]
            places = [] if self.places is None else self.places.places_N.tolist()
            for place, edge in zip(places, _edges_of(self.submit.pictures), strict=True):
                self._edges[place] = edge
            if self.adapter is not None:
                self._edges[0] = (self.adapter.digest, self._edges[0])
        self._edges += self.tokens[len(self._edges) :]
        return self._edges

    def piece(self, most: int) -> int:
        """Return how many of its next `most` tokens one step computes; more where a picture is seen whole."""
        if self.places is None:
            return most
        return self.places.end(self.cache.length, self.cache.length + most) - self.cache.length

    @property
    def decodes(self) -> bool:
        """True if only its newest token is missing."""
        return self.missing == 1 and self.new_tokens > 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        asked = self.index == 0 and self.submit.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < len(self.submit.ids) - self.submit.prompt_logprobs_from

    def enter(self, stage: Stage, now: float) -> None:
        """Book the time since the last change on the stage that ends; its siblings wait along with it."""
        for sibling in self.siblings:
            sibling.enter(stage, now)
        self._seconds[self.stage] = self._seconds.get(self.stage, 0.0) + now - self._since
        self.stage, self._since = stage, now

    def hand_over(self) -> Sequence:
        """Let the first of its siblings take its place, with its cache and the others; it is left with nothing."""
        heir, *heir.siblings = self.siblings
        self.siblings = []
        heir.key, heir.cache, self.cache = self.key, self.cache, CacheSequence(self.cache.prompt_tokens)
        heir.cached_tokens, heir.caught_up = self.cached_tokens, self.caught_up
        return heir

    def timing(self, now: float, version: str) -> Timing:
        """Return the timings so far; the four stages' seconds add up to those since its arrival.

        `version` is that of the weights which chose its last tokens.
        """
        self.enter(self.stage, now)
        seconds = self._seconds
        return Timing(
            queue_s=seconds.get("queue", 0.0),
            prefill_s=seconds.get("prefill", 0.0),
            decode_s=seconds.get("decode", 0.0),
            preempted_s=seconds.get("preempted", 0.0),
            grammar_s=self.constraint.seconds if self.constraint else 0.0,
            preemptions=self.preemptions,
            cached_tokens=self.cached_tokens or 0,
            computed_tokens=self.computed_tokens,
            speculated_tokens=self.speculated_tokens,
            accepted_tokens=self.accepted_tokens,
            proposed_at=self.proposed_at,
            accepted_at=self.accepted_at,
            versions=self._versions(version),
        )

    def _versions(self, version: str) -> list[tuple[str, int]]:
        """Return the versions that chose its tokens, with where each one's end; `version` alone where it has none."""
        spans = list[tuple[str, int]]()
        for name, end in (*self.versions, (version, self.new_tokens)):
            if spans and spans[-1][0] == name:
                spans.pop()
            if end > (spans[-1][1] if spans else 0):
                spans.append((name, end))
        return spans or [(version, 0)]


def _edges_of(pictures: list[Picture]) -> Iterator[int]:
    """A number for each place of pictures that no token has, and no place of another picture."""
    for picture in pictures:
        for place in range(picture.tokens):
            yield -1 - (int(picture.digest, 16) << 32 | place)


def order(submit: Submit, arrived: float, number: int) -> Key:
    """Priority and arrival as one fixed number, so that waiting for `AGEING_S` counts as much as one level."""
    return arrived + AGEING_S * submit.priority, number
