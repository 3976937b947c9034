"""Time-outs of processes that wait for each other: the run file's in a step, and none for long work.

What one process does for all (tokenizing, checksums, the trained model's files) takes as long as it takes. One that
dies meanwhile does not leave the others waiting, since its connections close.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

WITHOUT_END = timedelta(days=365)
_UNLIMITED = "background"


def unlimited_group() -> dist.ProcessGroup:
    """A gloo group of all processes that waits without end in a step too, for what goes on in the background."""
    group = dist.new_group(backend="gloo", timeout=WITHOUT_END, group_desc=_UNLIMITED)
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextmanager
def patient(timeout_s: float) -> Generator[None]:
    """Let collectives wait without end in the block, and `timeout_s` afterwards, on groups made in it as well."""
    _limit(WITHOUT_END)
    try:
        yield
    finally:
        _limit(timedelta(seconds=timeout_s))


def _limit(wait: timedelta) -> None:
    # Public since torch 2.15, where the old name warns.
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in list(distributed_c10d._world.pg_map):
        if group.group_desc != _UNLIMITED:
            set_timeout(wait, group)
