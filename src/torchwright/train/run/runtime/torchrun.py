"""The environment that torchrun and similar launchers give to processes."""

from __future__ import annotations

import os


def started() -> int | None:
    """Return how many processes were started together; None if this one was started alone."""
    world = os.environ.get("WORLD_SIZE")
    return None if world is None else int(world)


def restarts() -> int:
    """Return how often this node's torchrun has started its processes again after one of them failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def on_this_machine() -> int:
    """Return how many of the processes run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
