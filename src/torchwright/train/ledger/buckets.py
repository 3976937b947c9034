"""The buckets that a training job's time falls into: each second into exactly one (no torch import)."""

from __future__ import annotations

from torchwright.core.errors import TorchwrightError

BUCKETS: dict[str, str] = {
    "step": "forward, backward and optimizer of steps that the trained weights contain",
    "data_wait": "waiting for the next batch",
    "start": "from the process's start to its first phase, and what the program calls its start",
    "compile": "compiling",
    "evaluation": "evaluation and sample text",
    "checkpoint": "training stands still for a checkpoint",
    "lost_work": "steps that a later attempt had to do again",
    "recovery": "a restart, until it has reached the step at which the attempt before it ended",
    "idle": "no attempt running, or no phase named",
}
"""Bucket → what its seconds were spent on; in the order in which they are shown."""

FOLDER = "ledger"
"""The folder of ledgers in a run folder."""

FORMAT = 1
"""The first field of a ledger's first line; greater when an older reader would misread it."""

NANO = 1_000_000_000


class LedgerError(TorchwrightError):
    """A ledger that is missing or cannot be read, or a phase that does not exist."""
