"""Busy processes next to a measurement."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

MATRICES = "import torch; torch.set_num_threads({}); a = torch.randn(1024, 1024)\nwhile True: a @ a"
COUNTING = "while True: sum(range(100_000))"


@contextlib.contextmanager
def neighbours(count: int, code: str = COUNTING, *, settle_s: float = 1.0) -> Iterator[None]:
    """Run so many processes of `code` until the block ends; it begins after `settle_s`."""
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        time.sleep(settle_s)
        yield
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()


def multiplying(count: int, threads: int) -> contextlib.AbstractContextManager[None]:
    """Run processes that multiply matrices on so many threads; they import torch first, which takes a while."""
    return neighbours(count, MATRICES.format(threads), settle_s=20)
