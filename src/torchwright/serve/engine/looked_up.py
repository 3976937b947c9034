"""Speculation by prompt look-up in an engine: of what its sequences look up, as much as is worth its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from torchwright.serve.engine.acceptance import Acceptance
from torchwright.serve.engine.request import Sequence as Running
from torchwright.serve.engine.row_costs import RowCosts
from torchwright.serve.engine.speculate import LARGEST_PROPOSAL

LONG_RUN = 20
"""Equal last tokens behind which the looked-up continuation is expected to be right, until it has been measured."""


class LookedUp:
    """Proposals by look-up, by what they have been worth: acceptance by the run's length, against the cost of rows."""

    def __init__(self, verify: RowCosts) -> None:
        """`verify` are the costs of the decoder's rows."""
        self._verify = verify
        self._acceptance = Acceptance(), Acceptance()
        """By the share of `LONG_RUN` that the run had. The first is for greedy sequences, the second for drawn ones."""

    def propose(self, sequences: Sequence[Running], most: Callable[[Running], int], room: int) -> int:
        """Set the proposals of sequences that decode, `room` rows at most in all; return how many rows they take.

        `most` says how many each may get.
        """
        found = list[tuple[Running, list[int]]]()
        left = room
        for sequence in sequences:
            allowed = min(left, most(sequence), LARGEST_PROPOSAL)
            tokens = sequence.lookup.propose(allowed) if sequence.lookup and allowed > 0 else []
            if tokens:
                found.append((sequence, tokens))
                left -= len(tokens)
        if not found:
            return 0
        reaches = [list(accumulate([self.expects(one)] * len(tokens), mul)) for one, tokens in found]
        counts = self._verify.worth(reaches, len(sequences), room)
        for (sequence, tokens), count in zip(found, counts, strict=True):
            sequence.proposals = tokens[:count]
            if not count:
                self._of(sequence).forget(_share(sequence))
        return sum(counts)

    def expects(self, sequence: Running) -> float:
        """Return the expected acceptance of each token that the sequence looked up last."""
        return self._of(sequence).of(_share(sequence))

    def learn(self, sequence: Running, proposed: int, accepted: int) -> None:
        """Count what became of a sequence's proposals."""
        if sequence.lookup:
            self._of(sequence).learn([_share(sequence)] * proposed, accepted)
            sequence.lookup.learn(proposed, accepted)

    def _of(self, sequence: Running) -> Acceptance:
        return self._acceptance[sequence.chooser.is_random]


def _share(sequence: Running) -> float:
    return sequence.lookup.run / LONG_RUN if sequence.lookup else 0.0
