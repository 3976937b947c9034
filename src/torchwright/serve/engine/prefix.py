"""The prefix cache: a radix tree over full pages, so that a beginning that is known is not computed again.

tree = PrefixTree(cache, fingerprint)
tree.attach(sequence)       begin an empty sequence with the pages of its longest known prefix
tree.keep(sequence)         add the full pages that it has computed since
tree.detach(sequence)       before its pages are freed
tree.evict(3)               give pages back that no sequence uses, the least recently used first

One edge is one page's 16 tokens. The tree is a user of every page in it. A sequence that reads a page of the tree also
reads all pages above it, so pages below an unused page are unused as well.

For a model with recurrent layers pages are not enough to go on from: some nodes also have a copy of the state behind
their page, and a sequence begins behind the last such node. Copies are given up, the least recently used first, before
a sequence goes without a slot.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from torchwright.models.decoder.cache import PAGE, CacheSequence, PagedCache

Edge = tuple[Hashable, ...]
SLACK = 64
STATE_EVERY = 16
"""Pages from one lasting copy of a state to the next: what a prefix that ends in between computes again is at most 256
tokens, and for most models copies take less memory than the pages."""


@dataclass(eq=False)
class Node:
    """One page of the tree; the root has none."""

    page: int
    edge: Edge
    parent: Node | None
    children: dict[Edge, Node] = field(default_factory=dict)
    users: int = 0
    """Sequences that read it."""
    used: int = 0
    """When a sequence last stopped reading it, as a count of such events."""
    alive: bool = True
    state: int | None = None
    """The slot of a copy of the state behind its page."""


class PrefixTree:
    """Pages by the tokens that they were computed from; all of one model's weights and one type of keys and values.

    `fingerprint` names these two: pages of another are other pages, and another tree's.
    """

    def __init__(self, cache: PagedCache, fingerprint: str) -> None:
        self.cache, self.fingerprint = cache, fingerprint
        self._root = Node(page=-1, edge=(), parent=None)
        self._ends: dict[CacheSequence, tuple[Node, int]] = {}
        """The deepest node that each sequence reads, and how many pages lead to it."""
        self._leaves: list[tuple[int, int, Node]] = []
        """A heap of leaves that nobody reads, and of some that have changed since (`_idle` tells)."""
        self._nodes = self._in_use = self._clock = self._pushed = 0
        self._stateful: dict[Node, None] = {}
        """Nodes with a copy of a state, the least recently used first."""
        self._passing: dict[CacheSequence, Node] = {}
        """The node whose copy each sequence leaves behind when it has a newer one."""

    @property
    def evictable(self) -> int:
        """Pages that only the tree holds."""
        return self._nodes - self._in_use

    def attach(self, sequence: CacheSequence, ids: Sequence[Hashable], most: int) -> int:
        """Begin an empty sequence with what the tree has of its tokens, at most `most` of them; says how many."""
        node, path = self._root, list[Node]()
        for start in range(0, most - PAGE + 1, PAGE):
            child = node.children.get(tuple(ids[start : start + PAGE]))
            if child is None:
                break
            node = child
            path.append(node)
        if self.cache.states is not None:
            while path and path[-1].state is None:
                path.pop()
        end = path[-1] if path else self._root
        if end.state is not None:
            self._stateful[end] = self._stateful.pop(end)
            self.make_room_for_a_state()
            if end.state is None:  # it was the only one
                path, end = [], self._root
        self.cache.attach(sequence, [node.page for node in path], end.state)
        self._enter(sequence, end, len(path))
        return len(path) * PAGE

    def keep(self, sequence: CacheSequence, ids: Sequence[Hashable]) -> None:
        """Add the sequence's pages that have become full; where the tree has an equal one, the sequence takes that.

        `ids` are its tokens, as far as it is computed at least.
        """
        node, depth = self._ends[sequence]
        while (depth + 1) * PAGE <= sequence.length:
            edge = tuple(ids[depth * PAGE : (depth + 1) * PAGE])
            child = node.children.get(edge)
            if child is None:
                child = Node(sequence.pages[depth], edge, node)
                node.children[edge] = child
                self.cache.pool.share([child.page])
                self._nodes += 1
            elif child.page != sequence.pages[depth]:
                self.cache.exchange(sequence, depth, child.page)
            self._read(child)
            node, depth = child, depth + 1
            if depth * PAGE in sequence.marks:
                self._keep_state(sequence, node, depth)
        self._ends[sequence] = node, depth

    def _keep_state(self, sequence: CacheSequence, node: Node, depth: int) -> None:
        """Take a sequence's copy of its state over.

        In an answer only each `STATE_EVERY`th page keeps one, and the last page: that of the page before goes.
        """
        passed = self._passing.pop(sequence, None)
        if passed is not None:
            self._drop_state(passed)
        if node.state is None:
            node.state = sequence.marks.pop(depth * PAGE)
            self._stateful[node] = None
            if depth % STATE_EVERY and depth * PAGE >= sequence.prompt_tokens:
                self._passing[sequence] = node

    def make_room_for_a_state(self) -> None:
        """Let go of the least recently used copy of a state where no slot is free."""
        states = self.cache.states
        if states is not None and not states.free and self._stateful:
            self._drop_state(next(iter(self._stateful)))

    def _drop_state(self, node: Node) -> None:
        states = self.cache.states
        if node.state is not None and states is not None:
            states.give_back([node.state])
            del self._stateful[node]
            node.state = None

    def fork(self, sequence: CacheSequence, other: CacheSequence) -> None:
        """`other` is a fork of `sequence`."""
        self._enter(other, *self._ends[sequence])

    def detach(self, sequence: CacheSequence) -> None:
        """The sequence no longer reads pages of the tree."""
        self._passing.pop(sequence, None)
        end, _ = self._ends.pop(sequence)
        self._clock += 1
        node = end
        while node.parent is not None:
            node.users -= 1
            node.used = self._clock
            self._in_use -= node.users == 0
            node = node.parent
        self._offer(end)

    def evict(self, pages: int) -> None:
        """Give back that many pages, or all that no sequence reads."""
        while pages > 0 and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if not self._idle(node) or used != node.used:
                continue
            parent = node.parent
            assert parent is not None, "the root is no leaf"
            del parent.children[node.edge]
            node.alive = False
            self._drop_state(node)
            self._nodes -= 1
            pages -= 1
            self.cache.pool.release([node.page])
            self._offer(parent)

    def pages(self) -> list[int]:
        """Every page that the tree holds."""
        return [node.page for node in self._walk()]

    def state_slots(self) -> list[int]:
        """Every slot of a state that the tree holds."""
        return [node.state for node in self._walk() if node.state is not None]

    def check_integrity(self) -> None:
        """Raise `AssertionError` where the tree's own accounts are wrong."""
        nodes = list(self._walk())
        users = dict.fromkeys(nodes, 0)
        for sequence, (node, depth) in self._ends.items():
            while node.parent is not None:
                depth -= 1
                assert sequence.pages[depth] == node.page, "a sequence reads another page than its node's"
                users[node] += 1
                node = node.parent
            assert depth == 0, "a sequence's node is not as deep as it says"
        assert all(node.users == count for node, count in users.items()), "a node's users are not its readers"
        assert self._nodes == len(nodes), f"{len(nodes)} nodes, {self._nodes} counted"
        assert self._in_use == sum(node.users > 0 for node in nodes), "pages in use are counted wrongly"
        offered = {node for used, _, node in self._leaves if used == node.used}
        assert all(node in offered for node in nodes if self._idle(node)), "a leaf cannot be evicted"
        stateful = {node for node in nodes if node.state is not None}
        assert stateful == set(self._stateful), "a copy of a state cannot be given up"

    def _enter(self, sequence: CacheSequence, node: Node, depth: int) -> None:
        self._ends[sequence] = node, depth
        while node.parent is not None:
            self._read(node)
            node = node.parent

    def _read(self, node: Node) -> None:
        """One more sequence reads it."""
        self._in_use += node.users == 0
        node.users += 1

    def _offer(self, node: Node) -> None:
        """Make a node that nobody reads and that has no children one that can be evicted."""
        if not self._idle(node):
            return
        self._pushed += 1
        heapq.heappush(self._leaves, (node.used, self._pushed, node))
        if len(self._leaves) > 2 * self._nodes + SLACK:  # most of them have changed since
            self._leaves = [
                entry for entry in self._leaves if self._idle(entry[2]) and entry[0] == entry[2].used
            ]
            heapq.heapify(self._leaves)

    def _idle(self, node: Node) -> bool:
        return node.alive and node.parent is not None and not node.users and not node.children

    def _walk(self) -> Iterator[Node]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())
