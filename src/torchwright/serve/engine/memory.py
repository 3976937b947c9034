"""The engine's number of key-value pages."""

from __future__ import annotations

import torch

from torchwright.core.errors import WorkloadError
from torchwright.hardware.devices.cpu import available_memory_bytes
from torchwright.models.decoder.cache import PAGE
from torchwright.models.decoder.config import PagedConfig
from torchwright.serve.options import KV_SHARE

MOST = 0.9
"""Share of the available memory for one sequence of the whole context, if half is too little for that."""

ALLOCATORS_SAY = ("can't allocate memory", "bad_alloc")


def is_out_of_memory(error: Exception) -> bool:
    """Check whether memory could not be had; allocators of PyTorch and C++ raise a RuntimeError that says so."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in ALLOCATORS_SAY)


def page_bytes(config: PagedConfig, dtype: torch.dtype) -> int:
    """One page's keys and values in all layers."""
    return sum(shape.bytes_of(dtype) for shape in config.page_shapes)


def page_count(
    config: PagedConfig,
    dtype: torch.dtype,
    *,
    context: int,
    max_running: int,
    kv_memory: int | None = None,
    available: int | None = None,
) -> int:
    """Pages in `kv_memory` bytes, and no more than `max_running` sequences of `context` tokens can fill.

    Without `kv_memory`: half of the `available` bytes (by default the machine's), or most of them where one whole
    context needs it. Raises `WorkloadError` where there is not even room for one page.
    """
    size = page_bytes(config, dtype)
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
