"""Pages that the kernel gives anew: counted as they are touched, and what one takes."""

from __future__ import annotations

import mmap

import pytest

from torchwright.core.system import windows
from torchwright.hardware.measure.page_faults import page_fault_seconds, page_faults

pytestmark = pytest.mark.skipif(windows(), reason="Windows has no getrusage")


def test_fresh_memory_is_counted_once():
    with mmap.mmap(-1, 64 << 20) as fresh:
        counts = [page_faults()]
        for _ in range(2):
            fresh[:] = bytes(1) * len(fresh)
            counts.append(page_faults())
    first, again = counts[1] - counts[0], counts[2] - counts[1]
    assert first >= 32  # pages of 2 MB at most
    # `bytes` of 64 MB are fresh pages themselves, both times; those of the map are so once.
    assert again < first


def test_a_fault_takes_some_time_and_is_measured_once():
    seconds = page_fault_seconds()
    assert 0 < seconds < 0.01
    assert page_fault_seconds() == seconds
