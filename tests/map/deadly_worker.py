"""A worker process whose task is ended by one text and held for ever by another; it imports no torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torchwright.map import worker
from torchwright.map.tasks.base import Answer, Task


class Deadly(Task):
    """Answers with the length of a text."""

    def answer(self, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Answer]]:
        for place, row in enumerate(rows):
            if row["text"] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if row["text"] == "sleeps":
                time.sleep(600)
            yield place, {"embedding": [float(len(row["text"]))]}


if __name__ == "__main__":
    worker._open = lambda spec, threads: Deadly()
    sys.exit(worker.main(sys.argv[1:]))
