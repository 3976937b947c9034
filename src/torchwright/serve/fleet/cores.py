"""The cores of each replica: those that this process may use, divided without splitting a core's two threads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchwright.core.errors import WorkloadError

TOPOLOGY = Path("/sys/devices/system/cpu")
THREADS_VARIABLE = "OMP_NUM_THREADS"


def divide(processors: Sequence[int], count: int, topology: Path = TOPOLOGY) -> list[list[int]]:
    """Return the processors of each of `count` replicas; the first ones have one more where it does not come out even.

    Processors are dealt by socket and core, so that neighbours share caches. Raises `WorkloadError` for more replicas
    than processors.
    """
    if count > len(processors):
        raise WorkloadError(
            f"--replicas {count}",
            found=f"{len(processors)} processors that this process may use",
            allowed=f"1 to {len(processors)}: every replica computes on processors of its own",
        )
    ordered = sorted(processors, key=lambda number: (*_place(number, topology), number))
    size, more = divmod(len(ordered), count)
    ends = [size * (each + 1) + min(each + 1, more) for each in range(count)]
    return [sorted(ordered[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def on_cores(environment: Mapping[str, str], processors: Sequence[int]) -> dict[str, str]:
    """Return a replica's environment: a number of threads that was set for the whole machine is cut to its cores."""
    threads = environment.get(THREADS_VARIABLE, "")
    if not threads.isdigit() or int(threads) <= len(processors):
        return dict(environment)
    return {**environment, THREADS_VARIABLE: str(len(processors))}


def usable() -> list[int]:
    """Return the processors that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def _place(number: int, topology: Path) -> tuple[int, int]:
    """(socket, core) of a processor; a machine that does not tell has one of each."""
    folder = topology / f"cpu{number}" / "topology"
    return _number(folder / "physical_package_id"), _number(folder / "core_id")


def _number(file: Path) -> int:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
