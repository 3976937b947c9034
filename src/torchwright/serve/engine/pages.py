"""The cache's pages as the scheduler sees them: free ones, and those that only the prefix tree holds."""

from __future__ import annotations

from collections.abc import Iterable

from torchwright.models.decoder.cache import PAGE, PagedCache
from torchwright.serve.engine.prefix import STATE_EVERY, PrefixTree
from torchwright.serve.engine.request import Sequence


class Pages:
    """Gives sequences pages and takes them back; what a sequence has computed stays in the tree."""

    def __init__(self, cache: PagedCache, tree: PrefixTree | None, *, copies: int = 0) -> None:
        self.cache, self.tree = cache, tree
        self._copies = copies
        """Slots of states beyond those of the sequences that can run, which have theirs in any case."""

    @property
    def available(self) -> int:
        return self.cache.pool.free + self.cached

    @property
    def cached(self) -> int:
        """Pages that only the tree holds."""
        return self.tree.evictable if self.tree else 0

    def need(self, sequence: Sequence, tokens: int) -> int:
        """Pages that so many more tokens of a sequence take."""
        return self.cache.need(sequence.cache, tokens)

    def admit(self, sequence: Sequence) -> None:
        """Begin an empty sequence with its longest known prefix.

        Its last token is computed in any case, because its logits are wanted, and so are prompt tokens that report
        probabilities.
        """
        if self.tree:
            most = len(sequence.tokens) - 1
            if sequence.wants_prompt_logprobs:
                most = min(most, sequence.submit.prompt_logprobs_from)
            self.tree.attach(sequence.cache, sequence.edges, most)

    def keep(self, sequence: Sequence) -> None:
        """Remember the full pages that a sequence has computed."""
        if self.tree:
            self.tree.keep(sequence.cache, sequence.edges)
        self.cache.unmark(sequence.cache)

    def mark(self, pieces: Iterable[tuple[Sequence, int, int]]) -> None:
        """Have states copied on the way of a step: (sequence, tokens, the last of them that are only proposed).

        The state after each token that may turn out to be the last, so that the sequence can be wound back to it; and
        for the tree those that it wants, as far as there are slots.
        """
        if self.cache.states is None:
            return
        steps = list(pieces)
        for sequence, _, _ in steps:
            if sequence.cache.state is None:
                self._make_room_for_a_state()
                sequence.cache.state = self.cache.states.take_empty()
        wanted = [
            (sequence, sequence.cache.length + tokens - back)
            for sequence, tokens, proposed in steps
            for back in range(proposed, 0, -1)
        ]
        assert len(wanted) <= self._copies, "more tokens are proposed than states can be copied"
        if self.tree:
            wanted += [
                (sequence, length)
                for sequence, tokens, proposed in steps
                for length in _borders(sequence, tokens, proposed)
            ]
        for sequence, length in wanted[: self._copies]:
            self._make_room_for_a_state()
            self.cache.mark(sequence.cache, length)

    def _make_room_for_a_state(self) -> None:
        if self.tree:
            self.tree.make_room_for_a_state()

    def fork(self, sequence: Sequence, other: Sequence) -> None:
        """Let another sequence continue from the same tokens."""
        self._make_room_for_a_state()
        other.cache = self.cache.fork(sequence.cache)
        if self.tree:
            self.tree.fork(sequence.cache, other.cache)

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's pages back; the full ones stay in the tree for as long as nobody needs their room."""
        if self.tree:
            self.tree.keep(sequence.cache, sequence.edges)
            self.tree.detach(sequence.cache)
        self.cache.free(sequence.cache)

    def reserve(self, pages: int) -> None:
        """Make so many pages free; there must be as many `available`."""
        short = pages - self.cache.pool.free
        if self.tree and short > 0:
            self.tree.evict(short)

    def forget(self, fingerprint: str) -> None:
        """Let go of all that was computed by other weights than these; no sequence may hold pages."""
        if self.tree:
            self.tree.evict(self.tree.evictable)
            self.tree.fingerprint = fingerprint

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raise `AssertionError` unless every page's users are these sequences and the tree."""
        holders = [list(sequence.cache.pages) for sequence in sequences]
        if self.tree:
            self.tree.check_integrity()
            holders.append(self.tree.pages())
        self.cache.pool.check_integrity(holders)
        if self.cache.states is not None:
            held = [state for one in sequences if (state := one.cache.state) is not None]
            marks = [slot for one in sequences for slot in one.cache.marks.values()]
            self.cache.states.check_integrity(
                [*held, *marks, *(self.tree.state_slots() if self.tree else [])]
            )


def _borders(sequence: Sequence, tokens: int, proposed: int) -> list[int]:
    """The lengths within a step behind which the tree wants a sequence's state, the most useful first.

    Those behind the last whole page of a prompt, of which one token is computed again in any case; behind the last page
    of an answer so far; and behind each `STATE_EVERY`th page. Those of proposed tokens are copied anyway.
    """
    start, prompt = sequence.cache.length, len(sequence.submit.ids)
    last, ends = (prompt - 1) // PAGE, (start + tokens) // PAGE
    pages = range(start // PAGE + 1, ends + 1)
    wanted = [last] if last in pages else []
    wanted += [ends] if ends in pages and ends > last else []
    wanted += [page for page in reversed(pages) if page % STATE_EVERY == 0 and page not in wanted]
    end = start + tokens
    return [page * PAGE for page in wanted if not end - proposed <= page * PAGE < end]
