"""Speculation by prompt look-up: what followed the last tokens when they stood in the text before.

Proposed tokens are verified as rows of the same forward call: the token that a sequence's own sampler chooses at each
place must equal the proposal, or the rest is thrown away. So the answer is the same with and without.
"""

from __future__ import annotations

LONGEST, SHORTEST = 3, 2
"""Last tokens that are looked up, the longer run first."""
FIRST_PROPOSAL, LARGEST_PROPOSAL = 4, 8
LONGEST_PAUSE = 32
"""Steps without a proposal after many that failed."""


class Lookup:
    """One sequence's proposals: an index of its runs of tokens, and how many tokens are worth proposing."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._after: dict[tuple[int, ...], int] = {}
        """A run of tokens → where its latest continuation begins."""
        self._indexed = 0
        self._size, self._pause, self._wait = FIRST_PROPOSAL, 0, 0

    def propose(self, most: int) -> list[int]:
        """At most `most` tokens that may come next, none where the last ones are new or proposals have failed."""
        self._index()
        if self._wait:
            self._wait -= 1
            return []
        for length in range(LONGEST, SHORTEST - 1, -1):
            start = self._after.get(tuple(self._tokens[-length:]))
            if start is not None:
                period = len(self._tokens) - start  # a text that repeats itself goes on repeating
                return [self._tokens[start + i % period] for i in range(min(self._size, most))]
        return []

    def learn(self, proposed: int, accepted: int) -> None:
        """Propose more after success, less after failure, and pause, longer each time, where nothing is accepted."""
        if accepted == proposed:
            self._size, self._pause = min(LARGEST_PROPOSAL, self._size + 2), 0
        elif accepted:
            self._size, self._pause = max(1, accepted), 0
        else:
            self._size = max(1, self._size // 2)
            self._pause = min(LONGEST_PAUSE, 2 * self._pause + 1)
            self._wait = self._pause

    def _index(self) -> None:
        """Runs that end before the last token: the last run's own continuation is not known."""
        tokens, after = self._tokens, self._after
        for end in range(self._indexed, len(tokens)):
            for length in range(SHORTEST, LONGEST + 1):
                if end >= length:
                    after[tuple(tokens[end - length : end])] = end
        self._indexed = len(tokens)
