"""The cost of fresh pages: memory returned to the kernel is cleared again, page by page, when it is requested."""

from __future__ import annotations

import functools
import mmap
import time

from torchwright.core.system import windows

PROBE_BYTES = 16 << 20


def page_faults() -> int:
    """Pages that this process was given so far without reading a file (getrusage(2), ru_minflt); 0 on Windows."""
    if windows():
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@functools.cache
def page_fault_seconds() -> float:
    """Seconds a fault, from writing to fresh pages once.

    It is the low side of what a model pays, whose caches lose to the clearing what they held: EfficientNet-B0 (batch 8,
    one core of a Zen 4) has 43,000 a call and saves 2.6 us with each.
    """
    import torch

    with mmap.mmap(-1, PROBE_BYTES) as fresh:
        pages = torch.frombuffer(fresh, dtype=torch.uint8)[:: mmap.PAGESIZE]
        before, begun = page_faults(), time.perf_counter()
        pages.fill_(1)
        seconds, faults = time.perf_counter() - begun, page_faults() - before
        del pages  # which a closed file may not have
    return seconds / faults if faults else 0.0
