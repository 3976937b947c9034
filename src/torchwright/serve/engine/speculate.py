"""Speculation by prompt look-up: what followed the longest run of last tokens that stood in the text before.

Proposed tokens are verified as rows of the same forward call: the token that a sequence's own sampler chooses at each
place must equal the proposal, or the rest is thrown away. So the answer is the same with and without.
"""

from __future__ import annotations

from collections import deque

SHORTEST, LONGEST = 2, 32
"""Last tokens that are compared: fewer say little, and more say no more."""
PLACES = 32
"""Latest places of a run that are compared."""
FIRST_PROPOSAL, LARGEST_PROPOSAL = 4, 8
LONGEST_PAUSE = 32
"""Steps without a proposal after many that failed."""


class Lookup:
    """One sequence's proposals: an index of its runs of tokens, and how many tokens are worth proposing."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._places: dict[tuple[int, ...], deque[int]] = {}
        """A run of `SHORTEST` tokens → where its continuations begin, the latest last."""
        self._indexed = 0
        self._size, self._pause, self._wait = FIRST_PROPOSAL, 0, 0
        self.run = 0
        """Length of the run that the last proposal followed."""

    def propose(self, most: int) -> list[int]:
        """At most `most` tokens that may come next, none where the last ones are new or proposals have failed."""
        self._index()
        if self._wait:
            self._wait -= 1
            return []
        start = self._longest()
        if start is None:
            return []
        period = len(self._tokens) - start  # a text that repeats itself goes on repeating
        return [self._tokens[start + i % period] for i in range(min(self._size, most))]

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

    def _longest(self) -> int | None:
        """Return where the longest earlier run that equals the last tokens continues; of equally long ones, the
        latest.
        """
        tokens, best, most = self._tokens, None, 0
        for place in reversed(self._places.get(tuple(tokens[-SHORTEST:]), ())):
            run = SHORTEST
            while run < min(LONGEST, place) and tokens[place - run - 1] == tokens[-run - 1]:
                run += 1
            if run > most:
                best, most = place, run
                self.run = run
            if run == LONGEST:
                break
        return best

    def _index(self) -> None:
        """Runs that end before the last token: the last run's own continuation is not known."""
        tokens = self._tokens
        for end in range(max(self._indexed, SHORTEST), len(tokens)):
            self._places.setdefault(tuple(tokens[end - SHORTEST : end]), deque(maxlen=PLACES)).append(end)
        self._indexed = len(tokens)
