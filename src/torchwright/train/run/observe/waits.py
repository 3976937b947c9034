# pyright: basic
"""Waits of a program for its device or other processes, from the profiler's tree of Python and torch calls.

Counted are values fetched into Python (`item()`, `tolist()`, `float(tensor)`, `if tensor`), copies to the host
(`cpu()`, `numpy()`), `synchronize`, and collectives that are waited for. Each is reported by the last line that is
not torch's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FETCHED = "aten::_local_scalar_dense"
"""The operator below `item()`, `float(tensor)` and `if tensor`."""
COPIED = re.compile(r"<built-in method (item|tolist|cpu|numpy) of (?:Tensor|Parameter|DTensor) object")
WAITED = re.compile(
    r"<built-in (?:method wait of pybind11|function (?:_cuda_)?synchronize)|_c10d_functional::wait_tensor$"
)
COLLECTIVE = re.compile(r"torch/distributed/distributed_c10d\.py\(\d+\): ([a-z]\w+)$")
PYTHON = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)$")
"""The profiler's name of a Python call; the line is the first of the function."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """All waits of one kind in one line."""

    what: str
    """item, tolist, cpu, numpy, wait (for a collective that was begun before), synchronize, or a collective's name."""
    line: str
    """`file:line function`, the last outside of torch and of Python's library; empty for a thread of theirs."""
    count: int
    seconds: float
    """All of them together."""


def waits(profiler: Any) -> list[Wait]:
    """Every wait of what a profiler with stacks has recorded, those that took longest first."""
    found: dict[tuple[str, str], list[int]] = {}
    waiting = [(root, "") for root in profiler.profiler.kineto_results.experimental_event_tree()]
    while waiting:
        event, line = waiting.pop()
        line = _line(event) or line
        what = _wait(event)
        if what is None:
            waiting.extend((child, line) for child in event.children)
        else:  # inner calls are part of the wait
            found.setdefault((what, line), []).append(event.duration_time_ns)
    told = [
        Wait(what=what, line=line, count=len(times), seconds=sum(times) / 1e9)
        for (what, line), times in found.items()
    ]
    return sorted(told, key=lambda wait: -wait.seconds)


def _line(event: Any) -> str | None:
    """Return the line outside of torch that an event is, or is called from; None without such a line.

    The profiler knows the line of each call; of expressions without a call (`float(tensor)`, `if tensor`) the function.
    """
    call = PYTHON.match(event.name)
    if call and _own(call["file"]):
        return f"{call['file']}:{call['line']} {call['function']}"
    caller = getattr(event.extra_fields, "caller", None)
    if caller is None or not _own(caller.file_name):
        return None
    return f"{caller.file_name}:{caller.line_number} {caller.function_name}"


def _own(file: str) -> bool:
    """Check whether a file is neither torch's nor Python's."""
    first = file.removeprefix("<frozen ").partition("/")[0].removesuffix(".py").rstrip(">")
    return first != "torch" and first not in sys.stdlib_module_names


def _wait(event: Any) -> str | None:
    """Return what an event waits for, or None; a collective without a wait in its call does not stop the program."""
    if event.name == FETCHED:
        return "item"
    if copied := COPIED.match(event.name):
        return copied[1]
    if WAITED.match(event.name):
        return "synchronize" if "synchronize" in event.name else "wait"
    collective = COLLECTIVE.search(event.name)
    if collective and any(WAITED.match(inner.name) for inner in _within(event)):
        return collective[1]
    return None


def _within(event: Any) -> Iterator[Any]:
    waiting = list(event.children)
    while waiting:
        inner = waiting.pop()
        yield inner
        waiting.extend(inner.children)
