"""One line on stderr for a check that takes long."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

QUIET_SECONDS = 2.0
"""A check that ends sooner says nothing: most people wait that long without asking why."""


@contextlib.contextmanager
def announced(what: str, *, shown: bool) -> Iterator[None]:
    """Print one line to stderr if the block takes longer than QUIET_SECONDS."""

    def say() -> None:
        line = f"compile_numpy: compiling {what}, longer than {QUIET_SECONDS:g} s so far (progress=False hides this)"
        print(line, file=sys.stderr, flush=True)

    timer = threading.Timer(QUIET_SECONDS, say)
    timer.daemon = True
    if shown:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
