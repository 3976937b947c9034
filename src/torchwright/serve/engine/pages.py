"""The cache's pages as the scheduler sees them: free ones, and those that only the prefix tree holds."""

from __future__ import annotations

from torchwright.models.decoder.cache import PagedCache
from torchwright.serve.engine.prefix import PrefixTree
from torchwright.serve.engine.request import Sequence


class Pages:
    """Gives sequences pages and takes them back; what a sequence has computed stays in the tree."""

    def __init__(self, cache: PagedCache, tree: PrefixTree | None) -> None:
        self.cache, self.tree = cache, tree

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
            most = 0 if sequence.wants_prompt_logprobs else len(sequence.tokens) - 1
            self.tree.attach(sequence.cache, sequence.tokens, most)

    def keep(self, sequence: Sequence) -> None:
        """Remember the full pages that a sequence has computed."""
        if self.tree:
            self.tree.keep(sequence.cache, sequence.tokens)

    def fork(self, sequence: Sequence, other: Sequence) -> None:
        """Let another sequence continue from the same tokens."""
        other.cache = self.cache.fork(sequence.cache)
        if self.tree:
            self.tree.fork(sequence.cache, other.cache)

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's pages back; the full ones stay in the tree for as long as nobody needs their room."""
        if self.tree:
            self.tree.keep(sequence.cache, sequence.tokens)
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
