"""The key-value cache: pages of 16 tokens that sequences own, share and give back, and recurrent states.

cache = PagedCache(config, pages=64, dtype=torch.bfloat16)
sequence = cache.sequence(prompt_tokens=len(ids))
batch = cache.append([(sequence, ids)])     reserves slots, says where everything lies
hidden = decoder(batch, cache)              writes the keys and values
other = cache.fork(sequence)                shares all pages; the half-full one is copied when either appends
cache.free(sequence)
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from torchwright.core.errors import WorkloadError
from torchwright.hardware.devices.transfer import send
from torchwright.hardware.kernels.cpu.memory import zeros
from torchwright.hardware.kernels.gpu import operators as gpu
from torchwright.hardware.kernels.reference import PAGE
from torchwright.models.decoder.axes import PromptAxes, axes_of_batch
from torchwright.models.decoder.batch import Batch, StateRows
from torchwright.models.decoder.config import PagedConfig
from torchwright.models.decoder.pages import LayerPages, PageShape
from torchwright.models.decoder.states import StatePool

__all__ = ["PAGE", "CacheFull", "CacheSequence", "LayerCache", "LayerPages", "PagePool", "PagedCache"]


class CacheFull(WorkloadError):
    """More tokens than there are free pages for; a serving engine asks `can_append` first."""


@dataclass(eq=False)
class CacheSequence:
    """One sequence's pages and its length so far; made by `PagedCache.sequence` or `fork`."""

    prompt_tokens: int
    """Length of the whole prompt, however it is cut into chunks."""
    length: int = 0
    pages: array[int] = field(default_factory=lambda: array("i"))
    state: int | None = None
    """The slot of its state, from its first token on, for a model with recurrent layers."""
    marks: dict[int, int] = field(default_factory=dict)
    """Slots that have, or will have after the next tokens, a copy of its state, by its length there."""
    axes: PromptAxes | None = None
    """Positions of a prompt with pictures, where the rotary embedding has several."""


class PagePool:
    """Page numbers with reference counts: a page is free again when its last user releases it."""

    def __init__(self, pages: int) -> None:
        self._users = [0] * pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one user each; raises `CacheFull` and takes none when there are fewer."""
        if count > len(self._free):
            raise CacheFull(
                f"the key-value cache has no room for {count} more pages of {PAGE} tokens",
                found=f"{len(self._free)} of {len(self._users)} pages free",
                next="finish or free a sequence, or make the cache larger",
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more user for each page."""
        for page in pages:
            assert self._users[page] > 0, f"page {page} is free"
            self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One user fewer for each page."""
        for page in pages:
            assert self._users[page] > 0, f"page {page} is free"
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def shared(self, page: int) -> bool:
        return self._users[page] > 1

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless `holders`, the pages of each user, are all users that there are."""
        users = Counter(page for pages in holders for page in pages)
        for page, count in enumerate(self._users):
            assert count == users[page], f"page {page} has {count} users, {users[page]} of them known"
        free = [page for page, count in enumerate(self._users) if not count]
        assert sorted(self._free) == free, f"{len(self._free)} pages are listed as free, {len(free)} are"


class LayerCache:
    """Pages of keys and values of some layers, and the states of the recurrent ones, as layers take them."""

    def __init__(
        self, shapes: Sequence[PageShape], pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype, self.device = dtype, device
        self.layers = [_layer(pages, shape, dtype, device) for shape in shapes]
        self.states: StatePool | None = None


class PagedCache(LayerCache):
    """Keys and values of all layers for `pages` · 16 tokens, shared out among sequences.

    `dtype` is float32, bfloat16 or int8 (symmetric, one scale for each token and head). A model with recurrent layers
    needs a slot of `states` for each sequence that has begun, and for each copy of a state.
    """

    def __init__(
        self,
        config: PagedConfig,
        *,
        pages: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        states: int = 0,
        draft: Sequence[PageShape] = (),
    ) -> None:
        """`draft`: layers of a draft, which lie in the same pages."""
        super().__init__(config.page_shapes, pages, dtype, torch.device(device))
        self.pool = PagePool(pages)
        self.draft = LayerCache(draft, pages, dtype, self.device)
        if config.state_shapes:
            self.states = StatePool(config.state_shapes, states, self.device)

    def sequence(self, prompt_tokens: int, axes: PromptAxes | None = None) -> CacheSequence:
        """A new, empty sequence whose prompt will have `prompt_tokens` tokens."""
        return CacheSequence(prompt_tokens, axes=axes)

    def fork(self, sequence: CacheSequence) -> CacheSequence:
        """A sequence that continues from the same tokens and shares their pages."""
        state = None
        if self.states is not None and sequence.state is not None:
            state = self.states.take_copy(sequence.state)
        pages = sequence.pages[: -(-sequence.length // PAGE)]
        self.pool.share(pages)
        return CacheSequence(
            sequence.prompt_tokens, sequence.length, array("i", pages), state, axes=sequence.axes
        )

    def attach(self, sequence: CacheSequence, pages: Sequence[int], state: int | None = None) -> None:
        """Let an empty sequence begin with full pages that others hold; they share them from now on.

        `state` is the slot of the state behind them, of which it gets a copy.
        """
        assert not sequence.pages, "only an empty sequence can begin with shared pages"
        if self.states is not None and state is not None:
            sequence.state = self.states.take_copy(state)
        self.pool.share(pages)
        sequence.pages, sequence.length = array("i", pages), len(pages) * PAGE

    def exchange(self, sequence: CacheSequence, place: int, page: int) -> None:
        """Let a sequence read another sequence's equal full page instead of its own."""
        self.pool.share([page])
        self.pool.release([sequence.pages[place]])
        sequence.pages[place] = page

    def free(self, sequence: CacheSequence) -> None:
        """Give the sequence's pages back and leave it empty."""
        self.pool.release(sequence.pages)
        sequence.pages, sequence.length = array("i"), 0
        if self.states is not None and sequence.state is not None:
            self.states.give_back([sequence.state])
            sequence.state = None
        self.unmark(sequence)

    def mark(self, sequence: CacheSequence, length: int) -> None:
        """Keep a copy of the sequence's state after so many tokens, which the next `append` reaches."""
        assert self.states is not None, "a model without states"
        assert length > sequence.length, "the state after these tokens is gone"
        sequence.marks[length] = self.states.take()

    def mark_here(self, sequence: CacheSequence) -> None:
        """Keep a copy of the sequence's state as it is, in place of all others, so that it can come back to here."""
        self.unmark(sequence)
        if self.states is not None and sequence.state is not None:
            sequence.marks[sequence.length] = self.states.take_copy(sequence.state)

    def unmark(self, sequence: CacheSequence) -> None:
        """Give back the copies of the sequence's state that nobody has taken over."""
        if self.states is not None:
            self.states.give_back(sequence.marks.values())
        sequence.marks.clear()

    def rewind(self, sequence: CacheSequence, length: int) -> None:
        """Forget what comes after the first `length` tokens, and give the pages back that held nothing else.

        A sequence with a state can go back to its beginning, or to a length that was marked.
        """
        assert 0 <= length <= sequence.length, "a sequence is not as long as what it is wound back to"
        if self.states is not None and sequence.state is not None and length < sequence.length:
            self.states.give_back([sequence.state])
            assert not length or length in sequence.marks, (
                "nobody kept the state that a sequence is wound back to"
            )
            sequence.state = sequence.marks.pop(length) if length else None
        kept = -(-length // PAGE)
        self.pool.release(sequence.pages[kept:])
        sequence.pages, sequence.length = sequence.pages[:kept], length

    def can_append(self, pieces: Sequence[tuple[CacheSequence, Sequence[int]]]) -> bool:
        """Check whether enough pages are free to `append` these pieces."""
        return sum(self.need(sequence, len(ids)) for sequence, ids in pieces) <= self.pool.free

    def append(self, pieces: Sequence[tuple[CacheSequence, Sequence[int]]]) -> Batch:
        """Reserve slots for new tokens, at least one of each sequence, and describe them for `Decoder.forward`.

        Raises `CacheFull` and changes nothing when the pages do not suffice.
        """
        self.extend([(sequence, len(ids)) for sequence, ids in pieces])
        placed = [(sequence, ids, sequence.length - len(ids)) for sequence, ids in pieces]
        axes_AT = axes_of_batch(
            (sequence.axes, range(start, start + len(ids))) for sequence, ids, start in placed
        )
        batch = self._described(placed, axes_AT)
        return batch if self.states is None else replace(batch, states=self._state_rows(pieces))

    def at(self, pieces: Sequence[tuple[CacheSequence, Sequence[int], int]]) -> Batch:
        """Describe tokens in slots that sequences hold, from a place on each, for a draft; nothing is reserved."""
        return self._described(pieces, None)

    def _described(
        self, pieces: Sequence[tuple[CacheSequence, Sequence[int], int]], axes_AT: np.ndarray | None
    ) -> Batch:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        lengths: list[int] = []
        starts = [0]
        ends = [start + len(more) for _, more, start in pieces]
        longest = max(ends)
        tables_BP = np.zeros((len(pieces), -(-longest // PAGE)), np.int32)
        for row, ((sequence, more, start), end) in enumerate(zip(pieces, ends, strict=True)):
            pages, prompt = sequence.pages, sequence.prompt_tokens
            places = range(start, end)
            ids.extend(more)
            positions.extend(places)
            slots += [pages[place // PAGE] * PAGE + place % PAGE for place in places]
            lengths += [max(place + 1, prompt) for place in places]
            starts.append(len(ids))
            used = -(-end // PAGE)
            tables_BP[row, :used] = pages[:used]
        of_64_bits: dict[str, Any] = {
            "ids_T": ids,
            "positions_T": positions,
            "slots_T": slots,
            "lengths_T": lengths,
            "last_rows_B": [start - 1 for start in starts[1:]],
        }
        of_32_bits = {"block_tables_BP": tables_BP, "query_starts": starts, "context_lens_B": ends}
        if axes_AT is not None:
            of_64_bits["axes_AT"] = axes_AT
            longest = max(longest, int(axes_AT.max()) + 1)
        return Batch(**_arrays(self.device, of_64_bits, of_32_bits), longest=longest)

    def extend(self, pieces: Sequence[tuple[CacheSequence, int]]) -> None:
        """Reserve slots for so many new tokens of each sequence, without a batch; `CacheFull` as of `append`."""
        new = self.pool.allocate(sum(self.need(sequence, count) for sequence, count in pieces))
        for sequence, count in pieces:
            self._extend(sequence, count, new)
        self.pool.release(new)  # left over when a sequence and its only fork stop sharing a page in one batch

    def _state_rows(self, pieces: Sequence[tuple[CacheSequence, Sequence[int]]]) -> StateRows:
        """The slots of a batch, whose pieces have been appended."""
        starts = itertools.accumulate((len(ids) for _, ids in pieces), initial=0)
        copies = [
            (start + length - (sequence.length - len(ids)) - 1, slot)
            for (sequence, ids), start in zip(pieces, starts, strict=False)
            for length, slot in sorted(sequence.marks.items())
            if sequence.length - len(ids) < length <= sequence.length
        ]
        of = {
            "slots_B": [sequence.state for sequence, _ in pieces],
            "mark_rows_N": [row for row, _ in copies],
            "mark_slots_N": [slot for _, slot in copies],
        }
        return StateRows(
            **_on(self.device, {name: np.asarray(values, np.int64) for name, values in of.items()})
        )

    def need(self, sequence: CacheSequence, tokens: int) -> int:
        """Pages that `append` takes for so many more tokens."""
        pages = max(0, -(-(sequence.length + tokens) // PAGE) - len(sequence.pages))
        return pages + self._splits(sequence)

    def hold(self, sequence: CacheSequence, tokens: int) -> None:
        """Reserve the pages of so many tokens behind a sequence's last, for a draft; its length stays."""
        new = self.pool.allocate(self.need(sequence, tokens))
        self._split(sequence, new)
        sequence.pages.extend(new)

    def ahead(self, pieces: Sequence[tuple[CacheSequence, int]], offset: int) -> Batch:
        """One token for each sequence, in the slot `offset` behind its last; the slots are held."""
        return self.at([(sequence, [id], sequence.length + offset) for sequence, id in pieces])

    def _splits(self, sequence: CacheSequence) -> bool:
        """Check whether the next token falls into a page that another sequence also reads."""
        return sequence.length % PAGE > 0 and self.pool.shared(sequence.pages[sequence.length // PAGE])

    def _split(self, sequence: CacheSequence, new: list[int]) -> None:
        """Give a sequence a copy of the page that its next token falls into, where others also read it."""
        if not self._splits(sequence):
            return
        place, own = sequence.length // PAGE, new.pop()
        shared = sequence.pages[place]
        for layer in (*self.layers, *self.draft.layers):
            layer.copy(shared, own)
        self.pool.release([shared])
        sequence.pages[place] = own

    def _extend(self, sequence: CacheSequence, tokens: int, new: list[int]) -> None:
        assert tokens > 0, "a sequence without new tokens"
        self._split(sequence, new)
        if self.states is not None and sequence.state is None:
            sequence.state = self.states.take_empty()
        sequence.length += tokens
        while len(sequence.pages) * PAGE < sequence.length:
            sequence.pages.append(new.pop())


def _arrays(device: torch.device, of_64_bits: dict[str, Any], of_32_bits: dict[str, Any]) -> dict[str, Any]:
    """Lists as integer tensors of these sizes."""
    wide = {name: np.asarray(values, np.int64) for name, values in of_64_bits.items()}
    return _on(device, wide | {name: np.asarray(values, np.int32) for name, values in of_32_bits.items()})


def _on(device: torch.device, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Arrays, the widest type first, as tensors; they go to a GPU in one piece, because each transfer takes time."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    whole = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays.values()])
    parts = send(torch.from_numpy(whole), device).split([array.nbytes for array in arrays.values()])
    return {
        name: part.view(torch.from_numpy(array).dtype).view(array.shape)
        for (name, array), part in zip(arrays.items(), parts, strict=True)
    }


def _layer(pages: int, shape: PageShape, dtype: torch.dtype, device: torch.device) -> LayerPages:
    heads, size = shape.kv_heads, shape.head_dim
    if dtype == torch.bfloat16 and not gpu.takes(device):
        k, v = (pages, heads, size // 2, PAGE, 2), (pages, heads, PAGE // 2, size, 2)
    else:
        k, v = (pages, heads, size, PAGE), (pages, heads, PAGE, size)
    scale = (pages, heads, PAGE)
    has_scale = dtype == torch.int8
    return LayerPages(
        _zeros(k, dtype, device),
        _zeros(v, dtype, device),
        _zeros(scale, torch.float32, device) if has_scale else None,
        _zeros(scale, torch.float32, device) if has_scale else None,
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
