"""The other processes of `test_shared_memory.py`, and what every process computes."""

from __future__ import annotations

import time
from typing import Any

import torch

from torchwright.hardware.kernels.cpu import build

WAYS = 3


def open_memory(path: str, rank: int, ways: int, room: int = 1024, patience: float = 60.0) -> Any:
    assert build.load_fault() is None
    return torch.classes.torchwright.SharedMemory(path, rank, ways, room, patience)


def numbers(rank: int, call: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a process's numbers of a call, of very different sizes: another order of sums has other bits."""
    generator = torch.Generator().manual_seed(1_000 * call + rank)
    x = torch.randn(count, generator=generator, dtype=torch.float64) * 10.0 ** (3 * rank)
    if count > 4:
        x[call % count] = torch.tensor([torch.nan, torch.inf, -0.0])[(rank + call) % 3]
    return x.to(dtype)


def slow_sum(call: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """One number after the other, in the order of the processes."""
    parts = [numbers(rank, call, count, dtype) for rank in range(WAYS)]
    wide = torch.promote_types(dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(dtype)


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equal bits, but for those of NaN."""
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())


def sums(memory: Any, rank: int, calls: list[tuple[int, torch.dtype]]) -> None:
    for call, (count, dtype) in enumerate(calls):
        x = numbers(rank, call, count, dtype)
        memory.sum(x)
        assert same(x, slow_sum(call, count, dtype)), (call, count, dtype)


def gathers(memory: Any, rank: int, calls: list[tuple[int, torch.dtype]]) -> None:
    for call, (count, dtype) in enumerate(calls):
        wanted = torch.stack([numbers(other, call, count, dtype) for other in range(WAYS)])
        assert same(memory.gather(numbers(rank, call, count, dtype)), wanted), (call, count, dtype)


JOBS = {"sums": sums, "gathers": gathers}


def peer(opened: Any, path: str, rank: int, job: str, calls: list[tuple[int, torch.dtype]]) -> None:
    """One process: it ends with code 0 where all it computed was right."""
    torch.set_num_threads(1)
    memory = open_memory(path, rank, WAYS)
    opened.wait()
    JOBS[job](memory, rank, calls)


def call_once(opened: Any, path: str, job: str) -> None:
    """The second of two processes: it makes one call, and then none for as long as it lives."""
    memory = open_memory(path, 1, 2)
    opened.wait()
    memory.sum(torch.ones(4))
    if job == "leave":
        del memory
    time.sleep(600)
