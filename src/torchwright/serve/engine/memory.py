"""The engine's memory for keys and values and for recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchwright.core.errors import WorkloadError
from torchwright.hardware.devices.cpu import available_memory_bytes
from torchwright.models.decoder.cache import PAGE
from torchwright.models.decoder.config import PagedConfig
from torchwright.models.decoder.pages import PageShape
from torchwright.serve.engine.prefix import STATE_EVERY
from torchwright.serve.options import KV_SHARE

MOST = 0.9
"""Share of the available memory for one sequence of the whole context, if half is too little for that."""

ALLOCATORS_SAY = ("can't allocate memory", "bad_alloc")


def is_out_of_memory(error: Exception) -> bool:
    """Check whether memory could not be had; allocators of PyTorch and C++ raise a RuntimeError that says so."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in ALLOCATORS_SAY)


def page_bytes(config: PagedConfig, dtype: torch.dtype, draft: Sequence[PageShape] = ()) -> int:
    """One page's keys and values in all layers, those of a draft included."""
    return sum(shape.bytes_of(dtype) for shape in (*config.page_shapes, *draft))


def page_count(
    config: PagedConfig,
    dtype: torch.dtype,
    *,
    context: int,
    max_running: int,
    kv_memory: int | None = None,
    available: int | None = None,
    draft: Sequence[PageShape] = (),
) -> int:
    """Pages in `kv_memory` bytes, and no more than `max_running` sequences of `context` tokens can fill.

    Without `kv_memory`: half of the `available` bytes (by default the machine's), or most of them where one whole
    context needs it. Raises `WorkloadError` where there is not even room for one page.
    """
    size = max(1, page_bytes(config, dtype, draft))  # pages of recurrent layers alone have no keys and values
    whole = -(-context // PAGE)
    if kv_memory is None:
        available = available_memory_bytes() if available is None else available
        kv_memory = int(available * KV_SHARE)
        if kv_memory < whole * size <= available * MOST:
            kv_memory = whole * size
    pages = min(kv_memory // size, max_running * whole)
    if pages < 1:
        raise WorkloadError(
            f"{kv_memory} bytes for keys and values",
            allowed=f"at least {size}, one page of {PAGE} tokens",
            next=f"--kv-memory {whole * size} holds one sequence of {context} tokens",
        )
    return pages


@dataclass(frozen=True)
class CacheSize:
    """The room of an engine's cache."""

    pages: int
    running: int
    """Sequences that can run at once."""
    copies: int = 0
    """Slots for copies of states, for a model that has states."""
    draft: tuple[PageShape, ...] = ()
    """A draft's layers, whose keys and values lie in the same pages."""

    def bytes_of(self, config: PagedConfig, dtype: torch.dtype) -> int:
        return self.pages * page_bytes(config, dtype, self.draft) + (
            self.running + self.copies
        ) * state_bytes(config)


def state_bytes(config: PagedConfig) -> int:
    """One sequence's state in all layers."""
    return sum(shape.bytes for shape in config.state_shapes)


def cache_size(
    config: PagedConfig,
    dtype: torch.dtype,
    *,
    context: int,
    max_running: int,
    kv_memory: int | None = None,
    available: int | None = None,
    draft: Sequence[PageShape] = (),
) -> CacheSize:
    """Divide `kv_memory` bytes, by default half of those `available`, between pages and states.

    States take at most half: one for each running sequence, and as many copies, or one for each `STATE_EVERY` pages
    where that is more. So fewer sequences than `max_running` may run where states are large. Raises `WorkloadError`
    where the memory does not suffice for one sequence.
    """
    state = state_bytes(config)
    if not state:
        pages = page_count(
            config,
            dtype,
            context=context,
            max_running=max_running,
            kv_memory=kv_memory,
            available=available,
            draft=draft,
        )
        return CacheSize(pages, max_running, draft=tuple(draft))
    if kv_memory is None:
        kv_memory = int((available_memory_bytes() if available is None else available) * KV_SHARE)
    slots = kv_memory // 2 // state
    running = min(max_running, slots // 2)
    if running < 1:
        raise WorkloadError(
            f"{kv_memory} bytes for keys, values and states",
            allowed=f"at least {4 * state}, of which half holds a sequence's state and a copy",
            next=f"--kv-memory {4 * state}, or more",
        )
    most = page_count(config, dtype, context=context, max_running=running, kv_memory=kv_memory, draft=draft)
    copies = min(slots - running, max(running, most // STATE_EVERY))
    left = kv_memory - (running + copies) * state
    pages = page_count(config, dtype, context=context, max_running=running, kv_memory=left, draft=draft)
    return CacheSize(pages, running, copies, tuple(draft))
