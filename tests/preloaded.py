"""What processes of tests are forked with.

Each pytest process has one server that forks them, which the first test that forks starts: so all ask for the same.
"""

from __future__ import annotations

from torchwright.train.prove import processes

PRELOADED = [
    *processes.PRELOADED,
    "torchwright.train.run.loop.train",
    "torchwright.train.hang.watch",
    "torchao.float8",
    "transformers",
    "pytest",
]
