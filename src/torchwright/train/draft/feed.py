"""The micro-batches of steps with the target's hidden states: computed when they are read, or ahead by producers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator

from torchwright.train.draft.objective import DraftBatch
from torchwright.train.draft.producers import Producers
from torchwright.train.draft.target import TargetModel
from torchwright.train.run.objectives.objective import MicroBatch

AHEAD = 2
"""Micro-batches that each producer is asked for: one that it computes, and one to go on with."""


class Feed:
    """Reads a run's steps one after the other."""

    def __init__(
        self,
        windows: Callable[[int], list[MicroBatch]],
        micro_batches: int,
        last: int,
        target: TargetModel,
        observed: tuple[int, ...],
    ) -> None:
        """`windows` are the `micro_batches` of a step, of which there are `last`."""
        self._windows, self._micro_batches, self._last = windows, micro_batches, last
        self._target, self._observed = target, observed
        self._producers: Producers | None = None
        self._asked: deque[MicroBatch] = deque()
        self._coming: Iterator[MicroBatch] | None = None

    def produce_by(self, producers: Producers) -> None:
        """Have the states of all steps that are not read yet computed by these processes."""
        self._producers = producers

    def of_step(self, step: int) -> list[DraftBatch]:
        """Return the micro-batches of a step; each call is for the step after that of the call before."""
        if self._producers is None:
            return [self.with_states(windows) for windows in self._windows(step)]
        if self._coming is None:
            self._coming = itertools.chain.from_iterable(map(self._windows, range(step, self._last)))
        return [self._taken(self._producers, self._coming) for _ in range(self._micro_batches)]

    def _taken(self, producers: Producers, coming: Iterator[MicroBatch]) -> DraftBatch:
        for windows in itertools.islice(coming, AHEAD * producers.count - len(self._asked)):
            producers.ask(windows)
            self._asked.append(windows)
        return DraftBatch(states=producers.take(), windows=self._asked.popleft())

    def with_states(self, windows: MicroBatch) -> DraftBatch:
        """Return a micro-batch with states that are computed here."""
        states = self._target.hidden_states(
            self._observed, windows.ids_BT, windows.labels_BT, windows.documents_BS
        )
        return DraftBatch(windows=windows, states=states)

    def close(self) -> None:
        """End the producers."""
        if self._producers is not None:
            self._producers.close()
