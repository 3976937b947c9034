"""This rank's dump: PyTorch's flight recorder, completed by what it leaves out.

What torch 2.13's recorder does for gloo was found by experiment. Collectives are recorded with shapes, dtypes and
stacks, but their state stays `scheduled`. A call that failed is `retired` like one that succeeded. The members of
groups are missing from `pg_config`, sends and receives are not recorded at all, and the JSON has no stacks (the pickle
has). So we read the pickle of our own process, add the groups from `torch.distributed`, record messages ourselves, and
add where the main thread stands. The result is JSON in the recorder's own form, with one more key.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torchwright.core.process.files import replacing
from torchwright.train.hang.read import OWN

ENTRIES = 2000
"""Calls that are kept."""


class _Message:
    """A send or a receive; its end is asked when it is dumped."""

    number = itertools.count(1)

    def __init__(self, name: str, group: Any, tensors: Any, peer: int) -> None:
        from torch.distributed import get_global_rank

        rank, arrow = get_global_rank(group, group.rank()), "->" if name == "send" else "<-"
        self.work: weakref.ref[Any] | None = None
        self.entry: dict[str, Any] = {
            "process_group": [group.group_name, group.group_desc],
            "profiling_name": f"message:{name} {rank}{arrow}{get_global_rank(group, peer)}",
            "is_p2p": True,
            "p2p_seq_id": next(self.number),
            "time_created_ns": time.time_ns(),
            "input_sizes": [list(tensor.shape) for tensor in tensors],
            "input_dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "frames": _stack(sys._getframe(2)),
        }

    def dumped(self) -> dict[str, Any]:
        work = self.work and self.work()
        # A work that nobody holds any more was waited for.
        ended = self.work is not None and (work is None or work.is_completed())
        return self.entry | {"state": "completed" if ended else "scheduled"}


_MESSAGES: deque[_Message] = deque(maxlen=ENTRIES)
_SINCE = [0, 0]
"""When the recording of the present process groups began: nanoseconds since 1970, and of the monotonic clock. Like
PyTorch's ring these two belong to the process; the ring still has the calls of groups that were destroyed, whose names
and numbers come again."""
LAST = 50
"""Calls in the dump of a rank that finished."""


def turn_on(entries: int = ENTRIES) -> None:
    """Turn PyTorch's recorder on and ours for messages; before `torch.distributed.init_process_group`.

    A value that the user has set in the environment stays.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(entries))
    _SINCE[:] = time.time_ns(), time.monotonic_ns()
    _record_messages()


def is_on() -> bool:
    """Check whether `turn_on` was called."""
    return _SINCE[0] > 0


def write_dump(
    folder: Path,
    *,
    rank: int,
    world: int,
    started_ns: int,
    reason: str,
    failed: bool = False,
    finished: bool = False,
) -> Path:
    """Write `folder/rank_N.json` through a temporary file and a rename.

    `failed`: the rank left its program by an exception. `finished`: it came to its end; then only the last calls.
    """
    content = _recorded()
    if finished:
        content["entries"] = content["entries"][-LAST:]
    content[OWN] = {
        "rank": rank,
        "world": world,
        "taken_ns": time.time_ns(),
        "started_ns": started_ns,
        "since_ns": _since(*_SINCE),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "reason": reason,
        "failed": failed,
        "finished": finished,
        "stack": [] if finished else _main_stack(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{rank}.json"
    with replacing(path) as beside:
        beside.write_text(json.dumps(content), encoding="utf-8")
    return path


def _since(began: int, began_monotonic: int) -> int:
    """Return the start of the recording by the present clock, which may have been set back: it stamps calls."""
    return min(began, time.time_ns() - (time.monotonic_ns() - began_monotonic))


def _recorded() -> dict[str, Any]:
    import torch
    from torch._C import _distributed_c10d as c10d

    content: dict[str, Any] = {"entries": [], "pg_config": _groups()}
    with _without_inductor(torch):
        # NCCL has a recorder of its own; the other one is gloo's and the CPU's.
        for name in ("_dump_nccl_trace", "_dump_fr_trace"):
            take = getattr(c10d, name, None)
            if take is not None:
                # The pickle of this very process, of plain data; only it has the stacks.
                trace: dict[str, Any] = pickle.loads(take())
                content["entries"] += trace.pop("entries", [])
                trace.pop("pg_config", None)
                content |= trace
    content["entries"] += [message.dumped() for message in list(_MESSAGES)]
    return content


def _groups() -> dict[str, Any]:
    """Every process group's name, description and members; the recorder knows them for NCCL only."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    return {
        name: {
            "name": name,
            "desc": getattr(group, "group_desc", ""),
            "ranks": str(sorted(world.pg_group_ranks.get(group, {}))),
        }
        for group, name in list(world.pg_names.items())
    }


@contextmanager
def _without_inductor(torch: Any) -> Generator[None]:
    """Keep the recorder from importing an unused Inductor to look for generated code: the import takes seconds, which a
    dumping process may not have."""
    if "torch._inductor" in sys.modules:
        yield
        return
    absent = object()
    torch._inductor = absent
    try:
        yield
    finally:
        if torch.__dict__.get("_inductor") is absent:
            del torch._inductor


def _main_stack() -> list[dict[str, Any]]:
    """The main thread's stack, innermost first; it can be read while that thread waits in C++."""
    return _stack(sys._current_frames().get(threading.main_thread().ident or 0))


def _stack(frame: FrameType | None) -> list[dict[str, Any]]:
    stack: list[dict[str, Any]] = []
    while frame is not None:
        code = frame.f_code
        stack.append({"filename": code.co_filename, "line": frame.f_lineno or 0, "name": code.co_qualname})
        frame = frame.f_back
    return stack


def _record_messages() -> None:
    """Record sends and receives, by standing before the two methods of a process group that make them."""
    from torch.distributed import ProcessGroup

    for name in ("send", "recv"):
        method = getattr(ProcessGroup, name)
        if not hasattr(method, "recorded_by_torchwright"):
            setattr(ProcessGroup, name, _recorded_message(name, method))


def _recorded_message(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(group: Any, tensors: Any, peer: int, tag: int) -> Any:
        if tensors[0].device.type != "cpu":  # NCCL's recorder has them
            return method(group, tensors, peer, tag)
        message = _Message(name, group, tensors, peer)
        _MESSAGES.append(message)
        work = method(group, tensors, peer, tag)
        message.work = weakref.ref(work)
        return work

    call.recorded_by_torchwright = True  # type: ignore[attr-defined]
    return call
