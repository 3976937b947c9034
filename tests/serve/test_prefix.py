"""The prefix tree against a plain model of it: what it finds, what it holds, and what it gives back first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from torchwright.models.decoder.cache import PAGE, CacheSequence, PagedCache
from torchwright.models.decoder.config import DecoderConfig
from torchwright.serve.engine.prefix import PrefixTree


def small_cache(pages: int) -> PagedCache:
    """Pages that hold next to nothing."""
    config = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocabulary=8,
        model=2,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=2,
        feed_forward=2,
        context=10_000,
        eps=1e-6,
        activation="silu",
        tied=True,
        ropes=(None,),
        windows=(0,),
        sparse=(False,),
        scale=1.0,
    )
    return PagedCache(config, pages=pages, dtype=torch.float32)


def text(*pages: int) -> list[int]:
    """Token ids of whole pages, each of one repeated token."""
    return [page for page in pages for _ in range(PAGE)]


class Holder:
    """A tree, its cache, and sequences as the engine uses them."""

    def __init__(self, pages: int) -> None:
        self.cache = small_cache(pages)
        self.tree = PrefixTree(self.cache, "weights")
        self.live: dict[CacheSequence, list[int]] = {}

    def start(self, ids: list[int], most: int | None = None) -> tuple[CacheSequence, int]:
        sequence = self.cache.sequence(len(ids))
        found = self.tree.attach(sequence, ids, len(ids) - 1 if most is None else most)
        self.live[sequence] = ids
        return sequence, found

    def compute(self, sequence: CacheSequence, tokens: int) -> None:
        ids = self.live[sequence]
        need = self.cache.need(sequence, tokens)
        self.tree.evict(need - self.cache.pool.free)
        self.cache.append([(sequence, ids[sequence.length : sequence.length + tokens])])
        self.tree.keep(sequence, ids)

    def end(self, sequence: CacheSequence) -> None:
        self.tree.keep(sequence, self.live.pop(sequence))
        self.tree.detach(sequence)
        self.cache.free(sequence)

    def remember(self, ids: list[int]) -> None:
        sequence, _ = self.start(ids)
        self.compute(sequence, len(ids) - sequence.length)
        self.end(sequence)

    def known(self, ids: list[int]) -> int:
        sequence, found = self.start(ids, len(ids))
        self.end(sequence)
        return found

    def check(self) -> None:
        self.tree.check_integrity()
        self.cache.pool.check_integrity([*(s.pages for s in self.live), self.tree.pages()])


def test_finds_the_longest_prefix_of_whole_pages() -> None:
    holder = Holder(20)
    holder.remember([*text(1, 2, 3), 4])
    for ids, found in (
        (text(1, 2, 3, 4), 3),
        (text(1, 2, 5), 2),
        (text(1, 2)[:-1], 1),
        (text(2, 1), 0),
        ([1], 0),
    ):
        assert holder.known(ids) == found * PAGE
    holder.check()
    assert holder.tree.evictable == 3


def test_never_serves_more_than_is_asked_for() -> None:
    holder = Holder(20)
    holder.remember(text(1, 2))
    assert holder.start(text(1, 2))[1] == PAGE
    assert holder.start(text(1, 2), 0)[1] == 0


def test_pages_that_are_read_are_not_evicted() -> None:
    holder = Holder(20)
    holder.remember(text(1, 2, 3))
    reader, found = holder.start(text(1, 2, 9))
    assert found == 2 * PAGE
    assert holder.tree.evictable == 1
    holder.tree.evict(100)
    holder.check()
    assert holder.known(text(1, 2, 3)) == 2 * PAGE
    holder.end(reader)
    holder.tree.evict(100)
    assert holder.cache.pool.free == 20


def test_the_least_recently_used_leaf_goes_first() -> None:
    holder = Holder(20)
    for branch in (2, 3, 4):
        holder.remember(text(1, branch))
    assert holder.known(text(1, 2)) == 2 * PAGE  # used again
    holder.tree.evict(1)
    assert holder.known(text(1, 3)) == PAGE
    holder.tree.evict(1)
    assert [holder.known(text(1, branch)) for branch in (4, 2)] == [PAGE, 2 * PAGE]


def test_equal_pages_of_two_sequences_become_one() -> None:
    holder = Holder(20)
    one, _ = holder.start(text(1, 2, 3))
    two, _ = holder.start(text(1, 2, 4))
    holder.compute(one, 3 * PAGE)
    holder.compute(two, 3 * PAGE)
    assert one.pages[:2] == two.pages[:2]
    assert holder.cache.pool.free == 20 - 4
    holder.check()
    holder.end(one)
    holder.check()
    assert holder.known(text(1, 2, 4)) == 3 * PAGE


def test_a_fork_reads_what_its_origin_reads() -> None:
    holder = Holder(20)
    one, _ = holder.start([*text(1, 2), 3])
    holder.compute(one, 2 * PAGE + 1)
    other = holder.cache.fork(one)
    holder.tree.fork(one, other)
    holder.live[other] = [*text(1, 2), 3]
    holder.end(one)
    assert holder.tree.evictable == 0
    holder.check()
    holder.end(other)
    assert holder.tree.evictable == 2


def test_many_uses_of_one_prefix_do_not_pile_up() -> None:
    holder = Holder(20)
    for _ in range(1000):
        holder.remember(text(1, 2, 3))
    assert len(holder.tree._leaves) < 100
    holder.check()


def test_integrity_notices_a_page_that_was_freed_under_it() -> None:
    holder = Holder(20)
    holder.remember(text(1, 2))
    holder.cache.pool.release([holder.tree.pages()[0]])
    with pytest.raises(AssertionError, match="users"):
        holder.check()


class Machine(RuleBasedStateMachine):
    """Sequences that begin, grow, part and end in any order, in few pages."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder(12)
        self.computed: set[tuple[int, ...]] = set()
        """Texts of whole pages that have been in the cache at some time."""

    @rule(pages=st.lists(st.integers(1, 2), min_size=1, max_size=4), rest=st.integers(0, PAGE - 1))
    def start(self, pages: list[int], rest: int) -> None:
        ids = text(*pages) + [3] * rest
        sequence, found = self.holder.start(ids)
        assert found < len(ids)
        assert not found or tuple(ids[:found]) in self.computed
        assert sequence.length == found

    @rule(data=st.data(), tokens=st.integers(1, 40))
    def compute(self, data: st.DataObject, tokens: int) -> None:
        open = [s for s, ids in self.holder.live.items() if s.length < len(ids)]
        if not open:
            return
        sequence = data.draw(st.sampled_from(open))
        ids = self.holder.live[sequence]
        tokens = min(tokens, len(ids) - sequence.length)
        if (
            self.holder.cache.need(sequence, tokens)
            > self.holder.cache.pool.free + self.holder.tree.evictable
        ):
            return
        self.holder.compute(sequence, tokens)
        self.computed |= {tuple(ids[:end]) for end in range(PAGE, sequence.length + 1, PAGE)}

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.holder.live:
            self.holder.end(data.draw(st.sampled_from(list(self.holder.live))))

    @rule(pages=st.integers(1, 3))
    def evict(self, pages: int) -> None:
        free, evictable = self.holder.cache.pool.free, self.holder.tree.evictable
        self.holder.tree.evict(pages)
        assert self.holder.cache.pool.free == free + min(pages, evictable)

    @invariant()
    def accounts_are_right(self) -> None:
        self.holder.check()


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTree = Machine.TestCase


@given(st.lists(st.lists(st.integers(1, 3), max_size=4), max_size=12))
@settings(max_examples=50, deadline=None)
def test_without_eviction_it_remembers_everything(texts: list[list[int]]) -> None:
    holder = Holder(60)
    for pages in texts:
        holder.remember(text(*pages, 9))
    for pages in texts:
        assert holder.known(text(*pages, 9)) == (len(pages) + 1) * PAGE
    holder.check()
