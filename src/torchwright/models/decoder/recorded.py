"""Decoding steps on a GPU as CUDA graphs: one launch for a step, whose kernels Python takes longer to ask for one by
one than a small batch takes to compute.

A recording serves steps that give each sequence one token. It has its own tensors for what a batch holds, with room for
more sequences and pages than there may be: a row of padding has no query and no slot, so that the kernels leave it out,
and no row depends on another or on the width of its table (`hardware/kernels/gpu/attention.py`). So the logits are to
the bit those of the layers' calls.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.cache import PAGE, PagedCache
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.feed_forward import RoutedExperts
from torchwright.models.decoder.plan import MOST_ROWS, hooks
from torchwright.models.decoder.rope import BY_LENGTH

Step = Callable[[Batch, PagedCache], torch.Tensor]
"""Logits (T, V) in float32 of all tokens of a batch."""
FIRST_PAGES = 64
"""Pages of a sequence for which the smallest recording has room, 1,024 tokens; each larger one has twice as many."""
SEEN = 2
"""Steps of one size before it is recorded, which takes as long as two or three."""


@dataclass(frozen=True)
class Room:
    """The capacity of a recording."""

    rows: int
    pages: int

    @classmethod
    def of(cls, batch: Batch) -> Room:
        """The smallest that holds it: so that a sequence that ends or grows seldom asks for another."""
        rows, pages = batch.block_tables_BP.shape
        most = FIRST_PAGES
        while most < pages:
            most *= 2
        return cls(rows if rows <= 4 else -(-rows // 8) * 8, most)


@dataclass
class Recording:
    """A step of one size: `play` computes what `batch` holds."""

    batch: Batch
    rows: int
    """Sequences in it; what follows is padding."""
    play: Callable[[], torch.Tensor]

    def logits(self, batch: Batch) -> torch.Tensor:
        self.rows = fill(self.batch, batch, self.rows)
        return self.play()[: self.rows]


class RecordedSteps:
    """The recordings of a decoder over one cache; graphs hold addresses of its pages and of the decoder's tensors."""

    def __init__(self, decoder: nn.Module, config: DecoderConfig, step: Step) -> None:
        self.unrecorded = _unrecorded(decoder, config)
        """Why its steps cannot be recorded, None where they can."""
        self._step, self._hooks = step, hooks(decoder)
        self._parts = [
            (owner, name, part)
            for module in decoder.modules()
            for owner in (module._parameters, module._buffers, module._modules)
            for name, part in owner.items()
        ]
        self._seen: Counter[Room] = Counter()
        self._recordings: dict[Room, Recording] = {}
        self._pool: Any = None

    @property
    def holds(self) -> bool:
        """Check whether the decoder's parts are those of its first step: a technique may have replaced some."""
        return all(owner.get(name) is part for owner, name, part in self._parts)

    def logits(self, batch: Batch, cache: PagedCache) -> torch.Tensor | None:
        """Logits (B, V) in float32, good until the next step; None where the layers have to be called.

        They have to while somebody watches what a part is given, and for the first steps of a size.
        """
        if self.unrecorded is not None or any(self._hooks):
            return None
        room = Room.of(batch)
        if room not in self._recordings:
            self._seen[room] += 1
            if self._seen[room] <= SEEN:
                return None
            self._recordings[room] = self._record(room, batch, cache)
        return self._recordings[room].logits(batch)

    def _record(self, room: Room, batch: Batch, cache: PagedCache) -> Recording:
        static = empty(room, batch.ids_T.device)
        rows = fill(static, batch, 0)
        with torch.cuda.device_of(batch.ids_T):
            self._step(static, cache)  # kernels are compiled and tables made outside of a recording
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            return Recording(static, rows, record(lambda: self._step(static, cache), self._pool))


steps: WeakKeyDictionary[PagedCache, RecordedSteps] = WeakKeyDictionary()
"""The steps of every GPU cache that a step ran over; outside the caches, like the plans of CPU caches."""


def recordable(batch: Batch) -> bool:
    """Check whether the batch is a decode step on a GPU: one token of text for each of a few sequences alone."""
    others = (batch.memory, batch.axes_AT, batch.pictures, batch.adapted, batch.features)
    if not _records(batch.ids_T.device) or any(other is not None for other in others):
        return False
    return len(batch.ids_T) == len(batch.context_lens_B) <= MOST_ROWS


def _records(device: torch.device) -> bool:
    return device.type == "cuda" and _has_card()


@functools.cache
def _has_card() -> bool:
    """Check whether a card can be used. Cached, because every step asks."""
    return torch.cuda.is_available()


def _unrecorded(decoder: nn.Module, config: DecoderConfig) -> str | None:
    if any(isinstance(module, RoutedExperts) for module in decoder.modules()):
        return "a mixture of experts, which are asked on the CPU who has rows"
    if any(isinstance(module, nn.Linear) for module in decoder.modules()):
        return "linear layers of PyTorch, whose rows depend on how many there are"
    if any(rope and rope.kind in BY_LENGTH for rope in config.ropes):
        return "a rotary embedding whose angles depend on the sequence's length"
    return None


def empty(room: Room, device: torch.device) -> Batch:
    """A batch of padding."""
    with torch.inference_mode(False):  # or nobody could fill it outside

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return Batch(
            ids_T=zeros(room.rows, dtype=torch.int64),
            positions_T=zeros(room.rows, dtype=torch.int64),
            slots_T=zeros(room.rows, dtype=torch.int64) - 1,
            lengths_T=zeros(room.rows, dtype=torch.int64),
            block_tables_BP=zeros(room.rows, room.pages, dtype=torch.int32),
            query_starts=zeros(room.rows + 1, dtype=torch.int32),
            context_lens_B=zeros(room.rows, dtype=torch.int32),
            last_rows_B=torch.arange(room.rows, device=device),
            longest=room.pages * PAGE,
        )


def fill(static: Batch, batch: Batch, before: int) -> int:
    """Let `static`, which held `before` sequences, hold those of `batch`; how many they are."""
    rows, pages = batch.block_tables_BP.shape
    static.ids_T[:rows].copy_(batch.ids_T)
    static.positions_T[:rows].copy_(batch.positions_T)
    static.slots_T[:rows].copy_(batch.slots_T)
    static.block_tables_BP[:rows, :pages].copy_(batch.block_tables_BP)
    static.context_lens_B[:rows].copy_(batch.context_lens_B)
    static.query_starts[: rows + 1].copy_(batch.query_starts)
    if rows != before:
        static.slots_T[rows:].fill_(-1)
        static.context_lens_B[rows:].zero_()
        static.query_starts[rows + 1 :].fill_(rows)
    return rows


def record(compute: Callable[[], torch.Tensor], pool: Any) -> Callable[[], torch.Tensor]:
    """`compute` as a graph that computes the same from what lies in the same tensors then."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = compute()

    def play() -> torch.Tensor:
        graph.replay()
        return outputs

    return play
