"""What torchrun and its like tell the processes that they start."""

from __future__ import annotations

import os


def started() -> int | None:
    """How many processes were started together; None where this one was started by itself."""
    world = os.environ.get("WORLD_SIZE")
    return None if world is None else int(world)


def restarts() -> int:
    """How often all of them were started again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
