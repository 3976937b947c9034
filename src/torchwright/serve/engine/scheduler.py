"""The request scheduler: decides who runs, who waits, and who is preempted.

Every step has one budget of tokens. First come the running sequences that decode, one token each with its speculative
tokens, then parts of the prompts of running sequences, then waiting sequences for which there is room. The order is
always that of `Sequence.key`, a mixture of priority and arrival, so that no sequence waits for ever.

When pages run out, the running sequence that is last in this order is preempted: it gives its pages back and is
recomputed later. So is one of a lower priority when a waiting one comes before it and finds no room. The first of all
is never preempted, and it fits by itself, so that all finish.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass, field
from typing import Protocol

from torchwright.serve.engine.request import Key, Sequence


class PageRoom(Protocol):
    """Pages, as far as the scheduler cares; see `pages.Pages`."""

    @property
    def available(self) -> int: ...
    def need(self, sequence: Sequence, tokens: int) -> int: ...
    def admit(self, sequence: Sequence) -> None: ...
    def release(self, sequence: Sequence) -> None: ...


@dataclass(kw_only=True)
class StepPlan:
    """One step: how many tokens of which sequences, proposals included."""

    budget: int
    """Tokens that are left; below 0 where a picture had to be whole."""
    tokens: dict[Sequence, int] = field(default_factory=dict)
    pages: dict[Sequence, int] = field(default_factory=dict)
    """New pages that each takes."""
    new_pages: int = 0
    """Their sum."""
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence, tokens: int, pages: int) -> None:
        self.tokens[sequence], self.pages[sequence] = tokens, pages
        self.budget -= tokens
        self.new_pages += pages

    def remove(self, sequence: Sequence) -> None:
        self.budget += self.tokens.pop(sequence, 0)
        self.new_pages -= self.pages.pop(sequence, 0)


class Scheduler:
    """Running and waiting sequences, and the plan of each step."""

    def __init__(self, room: PageRoom, *, step_tokens: int, max_running: int) -> None:
        self.running: list[Sequence] = []
        """In their order."""
        self._room, self._step_tokens, self._max_running = room, step_tokens, max_running
        self._waiting: list[tuple[Key, Sequence]] = []

    @property
    def waiting(self) -> list[Sequence]:
        """In no order."""
        return [sequence for _, sequence in self._waiting]

    @property
    def waits(self) -> int:
        return len(self._waiting)

    def submit(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.key, sequence))

    def join(self, sequence: Sequence) -> None:
        """A sequence that begins with the pages of a running one; its place was kept since that one was admitted."""
        insort(self.running, sequence, key=_key)

    def remove(self, sequence: Sequence, heir: Sequence | None = None) -> None:
        """A sequence that has ended, wherever it is; its pages are free, or its heir's, which takes its place."""
        if sequence in self.running:
            place = self.running.index(sequence)
            if heir is None:
                self._room.release(sequence)
            self.running[place : place + 1] = [] if heir is None else [heir]
        else:
            self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]
            heapq.heapify(self._waiting)
            if heir is not None:
                self.submit(heir)

    def preempt_all(self) -> list[Sequence]:
        """Let every running sequence give its pages back and wait for its turn; says which."""
        preempted, self.running = self.running, []
        for sequence in preempted:
            self.submit(sequence)
            self._room.release(sequence)
        return preempted

    def plan(self) -> StepPlan:
        """The next step; admits and preempts."""
        plan = StepPlan(budget=self._step_tokens)
        decoding = [sequence for sequence in self.running if sequence.decodes]
        for sequence in decoding:
            self._grant(plan, sequence, 1 + len(sequence.proposals))
        head = self._waiting[0][1] if self._waiting else None
        prompts = [sequence for sequence in self.running if not sequence.decodes]
        behind = [sequence for sequence in prompts if head is not None and _goes_first(head, sequence)]
        for sequence in prompts:
            if sequence not in behind:
                self._grant(plan, sequence, sequence.missing)
        # A sequence that gave its pages up in this step would take those for which it had to.
        if not plan.preempted:
            self._admit(plan)
        for sequence in behind:
            self._grant(plan, sequence, sequence.missing)
        return plan

    def _grant(self, plan: StepPlan, sequence: Sequence, wanted: int) -> None:
        """Plan a running sequence's tokens, at the cost of later sequences where pages are short."""
        if plan.budget <= 0 or sequence in plan.preempted:
            return
        tokens = sequence.piece(min(wanted, plan.budget))
        while (pages := self._room.need(sequence, tokens)) > self._room.available - plan.new_pages:
            if sequence.decodes and tokens > 1:
                tokens = 1
            elif self.running[-1] is sequence:
                return  # it keeps what it has; one that comes before it will free more
            else:
                self._preempt(plan, self.running[-1])
        plan.add(sequence, tokens, pages)

    def _preempt(self, plan: StepPlan, sequence: Sequence) -> None:
        plan.remove(sequence)
        self.running.remove(sequence)
        plan.preempted.append(sequence)
        self.submit(sequence)
        self._room.release(sequence)

    def _admit(self, plan: StepPlan) -> None:
        """Let waiting sequences run, in order, while there are places, budget, and pages for all their tokens."""
        if not self._waiting:
            return
        places, promised = self._taken(plan)
        while self._waiting and plan.budget > 0:
            sequence = self._waiting[0][1]
            if sequence in plan.preempted:
                return
            need = self._need(sequence, places, promised)
            if need is None:
                if not self.running or not _goes_first(sequence, self.running[-1]):
                    return
                self._preempt(plan, self.running[-1])
                places, promised = self._taken(plan)
                continue
            heapq.heappop(self._waiting)
            insort(self.running, sequence, key=_key)
            tokens = sequence.piece(min(sequence.missing, plan.budget))
            plan.add(sequence, tokens, self._room.need(sequence, tokens))
            plan.admitted.append(sequence)
            places -= 1 + len(sequence.siblings)
            promised += 1 + need

    def _taken(self, plan: StepPlan) -> tuple[int, int]:
        """Return the places that are free, and the pages that the running sequences still need."""
        places = self._max_running - sum(1 + len(sequence.siblings) for sequence in self.running)
        # What the running ones still lack is theirs, and one page more for each, since they grow.
        promised = sum(
            1 + max(plan.pages.get(sequence, 0), self._room.need(sequence, sequence.missing))
            for sequence in self.running
        )
        return places, promised

    def _need(self, sequence: Sequence, places: int, promised: int) -> int | None:
        """Return the pages that a waiting sequence needs next to a prefix that it finds; None if it does not fit."""
        if 1 + len(sequence.siblings) > places:
            return None
        self._room.admit(sequence)
        need = self._room.need(sequence, sequence.missing)
        if promised + need > self._room.available:
            self._room.release(sequence)
            return None
        return need


def _goes_first(waiting: Sequence, running: Sequence) -> bool:
    """Check whether a waiting sequence comes before a running one because of its priority."""
    return waiting.key < running.key and waiting.submit.priority < running.submit.priority


def _key(sequence: Sequence) -> Key:
    return sequence.key
