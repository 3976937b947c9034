"""The name of a start of the run, which its processes share and no other start has.

torchrun keeps its store when it starts processes again, with the addresses of those before in it. Its count of restarts
does not tell starts apart: each node's torchrun counts the failures of its own processes alone, so that two nodes have
different counts after one of them failed. Therefore the first process gives a name, and makes sure that who takes it
is alive: what a dead process wrote has a word that no living one waits for.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

POLL_S = 0.01
FIRST = "torchwright/start"
"""Key of the last start's name."""


@dataclass(frozen=True)
class Start:
    """A start of the run's processes."""

    name: str
    again: bool
    """True on the first process if the store knows an earlier start."""


def meet(store: Store, rank: int, world: int, timeout_s: float) -> Start:
    """Agree on the name of this start. Raises the store's error for processes that do not come in time."""
    word = secrets.token_hex(8)
    if rank:
        store.set(_hello(rank), word)
        answer = f"torchwright/answer/{rank}/{word}"
        store.wait([answer], timedelta(seconds=timeout_s))
        name = store.get(answer).decode()
        store.set(_taken(name, rank), "")
        return Start(name, again=False)
    again = store.check([FIRST])
    store.set(FIRST, word)
    waiting, until = set(range(1, world)), time.monotonic() + timeout_s
    while waiting:
        waiting -= {other for other in waiting if store.check([_taken(word, other)])}
        for other in waiting:
            if store.check([_hello(other)]):  # of this start or of one before: who is gone takes no answer
                store.set(f"torchwright/answer/{other}/{store.get(_hello(other)).decode()}", word)
        if waiting and time.monotonic() > until:
            store.wait([_taken(word, other) for other in waiting], timedelta(milliseconds=1))
        if waiting:
            time.sleep(POLL_S)
    return Start(word, again)


def _hello(rank: int) -> str:
    return f"torchwright/hello/{rank}"


def _taken(name: str, rank: int) -> str:
    return f"torchwright/taken/{name}/{rank}"
