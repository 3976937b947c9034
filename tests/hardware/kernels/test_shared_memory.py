"""Sums and gathers through shared memory: the bits of sums one by one, and an error where a process is missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_peers import JOBS, WAYS, call_once, open_memory, peer

from preloaded import forking
from torchwright.hardware.kernels.cpu import shared_memory

ROOM = 1024
"""Bytes of a slot: small, so that few numbers take several rounds."""
SIZES = (0, 1, 2, 15, 16, 17, 255, 256, 257, 1000)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)

Start = Callable[..., Any]


@pytest.fixture
def start(native: Any) -> Iterator[Start]:
    """Start processes on a function of `shared_peers`, each with its own arguments and a barrier for all and this one.

    What still runs in the end is killed.
    """
    context = forking()
    running = []

    def all_of(function: Callable[..., None], *arguments: tuple[Any, ...]) -> tuple[list[Any], Any]:
        opened = context.Barrier(len(arguments) + 1)
        for one in arguments:
            process = context.Process(target=function, args=(opened, *one), daemon=True)
            process.start()
            running.append(process)
        return running, opened

    yield all_of
    for process in running:
        process.kill()
        process.join()


@pytest.fixture
def file(native: Any, tmp_path: Path) -> Callable[[int], str]:
    def make(ways: int) -> str:
        path = tmp_path / "memory"
        path.write_bytes(bytes(torch.classes.torchwright.SharedMemory.size(ways, ROOM)))
        return str(path)

    return make


@pytest.mark.parametrize("job", JOBS)
def test_every_process_has_the_bits_of_the_slow_way(job: str, file: Callable[[int], str], start: Start):
    """Odd sizes, sizes of several rounds, types in turn, NaN and infinity; then many rounds one after the other."""
    calls = [(count, dtype) for dtype in DTYPES for count in SIZES] + [(33, torch.float32)] * 300
    path = file(WAYS)
    others, opened = start(peer, *[(path, rank, job, calls) for rank in range(1, WAYS)])
    memory = open_memory(path, 0, WAYS)
    opened.wait()
    JOBS[job](memory, 0, calls)
    for other in others:
        other.join()
        assert other.exitcode == 0


def together(path: str, start: Start, job: str, patience: float = 60.0) -> tuple[Any, Any]:
    """This process's memory and the other process, after a first call of both."""
    (other,), opened = start(call_once, (path, job))
    memory = open_memory(path, 0, 2, patience=patience)
    opened.wait()
    x = torch.ones(4)
    memory.sum(x)
    assert x.tolist() == [2.0] * 4
    return memory, other


def test_a_killed_process_is_an_error_and_not_a_hang(file: Callable[[int], str], start: Start):
    memory, other = together(file(2), start, "stay")
    os.kill(other.pid, 9)  # not waited for: it stays a zombie, whose number still exists
    with pytest.raises(RuntimeError, match="process 1 has ended"):
        memory.sum(torch.ones(4))
    with pytest.raises(RuntimeError, match="lost each other before"):
        memory.sum(torch.ones(4))


def test_a_process_that_lets_go_is_an_error(file: Callable[[int], str], start: Start):
    memory, _ = together(file(2), start, "leave")
    with pytest.raises(RuntimeError, match="process 1 has ended, or let go"):
        memory.sum(torch.ones(4))


@pytest.mark.slow
def test_a_process_that_does_not_come_is_given_up(file: Callable[[int], str], start: Start):
    # Longer than a busy machine takes for the first call.
    memory, _ = together(file(2), start, "stay", patience=5.0)
    with pytest.raises(RuntimeError, match="process 1 lives, and has not come for 5 s"):
        memory.sum(torch.ones(4))


def test_processes_that_make_different_calls_are_told(file: Callable[[int], str], start: Start):
    path = file(2)
    _, opened = start(call_once, (path, "stay"))
    memory = open_memory(path, 0, 2)
    opened.wait()
    with pytest.raises(RuntimeError, match="process 1 exchanges 16 bytes where process 0 exchanges 20"):
        memory.sum(torch.ones(5))


def test_what_is_not_such_memory_is_refused(file: Callable[[int], str], tmp_path: Path):
    path = file(2)
    for arguments in ((path, 2, 2, ROOM, 1.0), (path, 0, 2, ROOM + 1, 1.0), (path, 0, 0, ROOM, 1.0)):
        with pytest.raises(ValueError, match=r"rank|lines"):
            open_memory(*arguments)
    with pytest.raises(RuntimeError, match="bytes, not the"):
        open_memory(path, 0, 3, ROOM, 1.0)
    with pytest.raises(RuntimeError, match="cannot be opened"):
        open_memory(str(tmp_path / "none"), 0, 2, ROOM, 1.0)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(RuntimeError, match="cannot be opened"):
        open_memory(str(tmp_path / "link"), 0, 2, ROOM, 1.0)
    memory = open_memory(path, 0, 2, ROOM, 1.0)
    with pytest.raises(ValueError, match="float32, float64 or bfloat16"):
        memory.sum(torch.ones(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="contiguous"):
        memory.sum(torch.ones(4, 4)[:, 0])


def test_a_full_file_system_is_a_reason_and_leaves_no_file(
    native: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        shared_memory._make_file(2, tmp_path)
    assert not list(tmp_path.iterdir())
