"""What processes of tests are forked with.

Each pytest process has one server that forks them, which the first test that forks starts: so all ask for the same.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from torchwright.train.kinds import KINDS
from torchwright.train.prove import processes

PRELOADED = [
    *processes.PRELOADED,
    *sorted({verbs["train"].partition(":")[0] for verbs in KINDS.values()}),
    "torchwright.cli.failures",
    "torchwright.train.hang.watch",
    "torch.distributed.fsdp",
    "torchao.float8",
    "transformers",
    "pytest",
]


def forking() -> Any:
    """Return the context whose processes are forked from the server, which runs then."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes._start_forkserver()
    return context
