"""The scheduler by itself: its budget, its order, and that everything finishes however short pages are."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from torchwright.models.decoder.cache import PAGE, CacheSequence
from torchwright.serve.engine.request import AGEING_S, Sequence, order
from torchwright.serve.engine.sampling import Chooser
from torchwright.serve.engine.scheduler import Scheduler, StepPlan
from torchwright.serve.wire.messages import SamplingOptions, Submit


class FakeRoom:
    """Pages as numbers; nothing is shared."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.used: Counter[Sequence] = Counter()

    @property
    def available(self) -> int:
        return self.pages - self.used.total()

    def need(self, sequence: Sequence, tokens: int) -> int:
        return -(-(sequence.cache.length + tokens) // PAGE) - self.used[sequence]

    def admit(self, sequence: Sequence) -> None:
        assert not self.used[sequence]

    def release(self, sequence: Sequence) -> None:
        sequence.cache.length = 0
        del self.used[sequence]


class World:
    """A scheduler with a model that answers at once."""

    def __init__(self, pages: int, step_tokens: int, max_running: int) -> None:
        self.room = FakeRoom(pages)
        self.scheduler = Scheduler(self.room, step_tokens=step_tokens, max_running=max_running)
        self.step_tokens, self.max_running = step_tokens, max_running
        self.ended: list[str] = []
        self.first_preempted = False
        self._number = 0

    def submit(self, prompt: int, answer: int, *, priority: int = 0, now: float = 0.0) -> Sequence:
        id = str(self._number)
        submit = Submit(
            id=id, ids=[5] * prompt, max_tokens=answer, priority=priority, sampling=SamplingOptions()
        )
        sequence = Sequence(
            submit=submit,
            index=0,
            key=order(submit, now, self._number),
            arrived=now,
            tokens=[5] * prompt,
            cache=CacheSequence(prompt),
            chooser=Chooser(submit, 0),
        )
        self._number += 1
        self.scheduler.submit(sequence)
        return sequence

    def step(self) -> StepPlan:
        all_of_them = [*self.scheduler.running, *self.scheduler.waiting]
        first = min(all_of_them, key=lambda s: s.key, default=None)
        plan = self.scheduler.plan()
        self.first_preempted |= first in plan.preempted
        assert sum(plan.tokens.values()) == self.step_tokens - plan.budget <= self.step_tokens
        assert plan.new_pages <= self.room.available
        assert len(self.scheduler.running) <= self.max_running
        assert self.scheduler.running == sorted(self.scheduler.running, key=lambda s: s.key)
        for sequence, tokens in plan.tokens.items():
            assert tokens > 0
            assert self.room.need(sequence, tokens) == plan.pages[sequence]
        for sequence, tokens in plan.tokens.items():
            self.room.used[sequence] += plan.pages[sequence]
            sequence.cache.length += min(tokens, sequence.missing)
            if not sequence.missing:
                sequence.tokens.append(6)
                if sequence.new_tokens == sequence.submit.max_tokens:
                    self.scheduler.remove(sequence)
                    self.ended.append(sequence.submit.id)
        return plan


sizes = st.tuples(st.integers(1, 70), st.integers(1, 40), st.integers(-3, 3))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(sizes, min_size=1, max_size=12),
    st.integers(7, 20),
    st.integers(4, 60),
    st.integers(1, 4),
    st.data(),
)
def test_everything_finishes(
    requests: list[tuple[int, int, int]], pages: int, step_tokens: int, max_running: int, data: st.DataObject
) -> None:
    """Every request fits by itself (110 tokens in seven pages), and they come at any time."""
    world = World(pages, step_tokens, max_running)
    waiting = list(requests)
    steps = 0
    while waiting or world.scheduler.running or world.scheduler.waits:
        if waiting and (steps == 0 or data.draw(st.booleans())):
            prompt, answer, priority = waiting.pop()
            world.submit(prompt, answer, priority=priority, now=float(steps))
        world.step()
        steps += 1
        assert steps < 10_000
    assert len(world.ended) == len(requests)
    assert not world.first_preempted
    assert world.room.available == pages


def test_decodes_come_before_prompts_and_share_one_budget() -> None:
    world = World(pages=100, step_tokens=20, max_running=8)
    one = world.submit(10, 5)
    assert world.step().tokens == {one: 10}
    two = world.submit(50, 5)
    assert world.step().tokens == {one: 1, two: 19}
    three = world.submit(6, 5)
    assert world.step().tokens == {one: 1, two: 19}
    assert world.step().tokens == {one: 1, two: 12, three: 6}
    assert world.step().tokens == {one: 1, two: 1, three: 1}


def test_proposals_are_part_of_the_budget_and_give_way_to_pages() -> None:
    world = World(pages=2, step_tokens=20, max_running=8)
    one = world.submit(14, 18)
    world.step()
    one.proposals = [6] * 8
    assert world.scheduler.plan().tokens == {one: 9}
    world.room.pages = 1
    assert world.scheduler.plan().tokens == {one: 1}


def test_the_last_in_order_gives_its_pages_up() -> None:
    world = World(pages=6, step_tokens=100, max_running=8)
    old, young = world.submit(16, 20), world.submit(16, 20)
    urgent = world.submit(14, 20, priority=-1)
    assert len(world.step().tokens) == 3
    preempted: list[Sequence] = []
    while not preempted:
        preempted = world.step().preempted
    assert preempted == [young]
    assert world.scheduler.running == [urgent, old]
    assert young.cache.length == 0
    while world.scheduler.running or world.scheduler.waits:
        world.step()
    assert set(world.ended) == {old.submit.id, urgent.submit.id, young.submit.id}


def test_a_waiting_sequence_takes_the_room_of_those_with_a_lower_priority() -> None:
    """It takes places and pages; what gave way is computed later, and equal ones wait for their turn."""
    for pages, max_running in ((100, 2), (6, 8)):
        world = World(pages=pages, step_tokens=200, max_running=max_running)
        first = world.submit(16, 20)
        row = world.submit(40, 20, priority=50)
        assert len(world.step().tokens) == 2
        equal, soon = world.submit(30, 4, now=1.0, priority=50), world.submit(30, 4, now=2.0)
        plan = world.step()
        assert plan.preempted == [row]
        assert plan.admitted == [soon]
        assert world.scheduler.running == [first, soon]
        while world.scheduler.running or world.scheduler.waits:
            world.step()
        assert sorted(world.ended) == sorted(s.submit.id for s in (first, row, equal, soon))
        assert world.ended.index(row.submit.id) < world.ended.index(equal.submit.id) or max_running == 8


def test_a_prompt_is_not_computed_before_that_of_a_higher_priority() -> None:
    world = World(pages=100, step_tokens=20, max_running=8)
    row = world.submit(100, 5, priority=50)
    assert world.step().tokens == {row: 20}
    soon = world.submit(12, 5, now=1.0)
    assert world.step().tokens == {soon: 12, row: 8}
    assert world.step().tokens == {soon: 1, row: 19}


def test_a_row_that_has_waited_long_gives_way_no_more() -> None:
    world = World(pages=100, step_tokens=200, max_running=1)
    row = world.submit(10, 20, priority=50)
    world.step()
    world.submit(10, 2, now=50 * AGEING_S + 1)
    assert not world.step().preempted
    assert world.scheduler.running == [row]


def test_a_large_request_at_the_head_is_not_passed_by_small_ones() -> None:
    world = World(pages=10, step_tokens=200, max_running=8)
    world.submit(100, 20)
    world.step()
    large = world.submit(120, 2)
    small = world.submit(1, 2)
    while large in world.scheduler.waiting:
        plan = world.step()
        assert small not in plan.tokens or large in plan.tokens


def test_places_are_kept_for_siblings() -> None:
    world = World(pages=100, step_tokens=100, max_running=3)
    one = world.submit(4, 4)
    one.siblings = [world.submit(4, 4), world.submit(4, 4)]
    for sibling in one.siblings:
        world.scheduler.remove(sibling)
    other = world.submit(4, 4)
    assert world.step().tokens == {one: 4}
    assert world.scheduler.waiting == [other]


def test_one_level_of_priority_is_worth_a_time_of_waiting() -> None:
    submit = Submit(id="a", ids=[5], max_tokens=1, priority=1, sampling=SamplingOptions())
    plain = Submit(id="b", ids=[5], max_tokens=1, sampling=SamplingOptions())
    assert order(plain, AGEING_S - 1, 1) < order(submit, 0.0, 0)
    assert order(submit, 0.0, 0) < order(plain, AGEING_S + 1, 1)
