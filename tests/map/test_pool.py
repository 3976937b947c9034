"""Worker processes: parts come back from all of them, and a worker that is killed is replaced."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from folders import encoder, sentence_transformer
from torchwright.core.cpu_load import affinity
from torchwright.core.errors import ModelError, WorkloadError
from torchwright.map.compute import Computed, OutputForm
from torchwright.map.options import ModelOptions, TaskOptions
from torchwright.map.plan import Part
from torchwright.map.pool import Pool, WorkerDied, shared_out
from torchwright.map.sources import Record
from torchwright.map.tasks.base import TaskSpec

FORM = OutputForm(form="jsonl", fields={"embedding": "vector"})
WAIT_SECONDS = 120.0
"""A busy machine takes long to import torch."""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TaskSpec:
    folder = sentence_transformer(
        tmp_path_factory.mktemp("encoder"), encoder(), pooling={"pooling_mode_mean_tokens": True}
    )
    return TaskSpec(
        task="embed",
        kind="encoder",
        folder=str(folder),
        artifact=None,
        model=ModelOptions(model=str(folder)),
        options=TaskOptions(text_column="text"),
    )


@pytest.fixture
def pool(spec: TaskSpec) -> Iterator[Pool]:
    made = Pool(spec, FORM, workers=1, threads=1)
    yield made
    made.close()


def part(index: int) -> Part:
    return Part(
        index=index,
        source="a",
        kind="text",
        first_row=10 * index,
        records=[Record(1, b"one"), Record(2, b"two")],
    )


def results(pool: Pool) -> list[tuple[Part, Computed]]:
    """Everything that the pool computes."""
    found, until = list[tuple[Part, Computed]](), time.monotonic() + WAIT_SECONDS
    while pool.running() and time.monotonic() < until:
        found += pool.finished(0.1)
    return found


def test_a_killed_worker_loses_its_part_to_the_next(pool: Pool) -> None:
    pool.submit(part(0))
    [(_, before)] = results(pool)
    assert before.rows == 2
    [worker] = pool._workers
    os.kill(worker.process.pid, signal.SIGKILL)
    pool.submit(part(0))
    [(again, after)] = results(pool)
    assert again.index == 0
    assert (after.answers, after.rejected) == (before.answers, b"")
    assert pool._workers[0].process.pid != worker.process.pid


@pytest.mark.slow
def test_a_part_that_kills_real_workers_ends_the_run(pool: Pool) -> None:
    pool.submit(part(1))
    with pytest.raises(WorkerDied, match="rows 10 to 11 of a died 2 times"):
        kill_twice(pool, lambda worker: os.kill(worker.process.pid, signal.SIGKILL))


class PretendedWorker:
    """Has no process, is ready at once and never answers."""

    def __init__(self, cores: Sequence[int], threads: int, first: bytes) -> None:
        self.connection, self.theirs = multiprocessing.Pipe()
        self.theirs.send_bytes(pickle.dumps(("ready", [])))
        self.process = SimpleNamespace(wait=lambda: -signal.SIGKILL)
        self.ready = False
        self.part: Part | None = None

    def log(self) -> str:
        return "its last words"

    def close(self) -> None:
        self.connection.close()
        self.theirs.close()


def test_a_part_that_kills_ends_the_run(spec: TaskSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchwright.map.pool._Worker", PretendedWorker)
    pool = Pool(spec, FORM, workers=1, threads=1)
    pool.submit(part(1))
    with pytest.raises(WorkerDied, match="rows 10 to 11 of a died 2 times") as caught:
        kill_twice(pool, lambda worker: worker.theirs.close())
    assert "most likely out of memory; it said: its last words" in str(caught.value)
    pool.close()


def kill_twice(pool: Pool, kill: Callable[[Any], None]) -> None:
    """Kill the worker of the pool's one part, and the next one when it has the part."""
    for _ in range(2):
        while pool._workers[0].part is None:
            pool.finished(0.1)
        kill(pool._workers[0])
        pool.finished(WAIT_SECONDS)


def test_workers_are_pinned_to_their_cores_and_closed_with_the_pool(spec: TaskSpec) -> None:
    """They pin themselves before they import torch, which counts the cores."""
    cores = affinity()
    if len(cores) < 2:
        pytest.skip("one core")
    pool = Pool(spec, FORM, workers=2, threads=1)
    try:
        pids, until = [worker.process.pid for worker in pool._workers], time.monotonic() + WAIT_SECONDS
        while [os.sched_getaffinity(pid) for pid in pids] != [{cores[0]}, {cores[1]}]:
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_two_workers_share_the_parts(spec: TaskSpec) -> None:
    cores = affinity()
    if len(cores) < 2:
        pytest.skip("one core")
    pool = Pool(spec, FORM, workers=2, threads=1)
    try:
        pool.submit(part(0))
        pool.submit(part(1))
        found = results(pool)
        assert sorted(one.index for one, _ in found) == [0, 1]
        assert [os.sched_getaffinity(worker.process.pid) for worker in pool._workers] == [
            {cores[0]},
            {cores[1]},
        ]
    finally:
        pool.close()


def test_what_a_worker_refuses_is_raised_here(spec: TaskSpec, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    broken = TaskSpec(**{**vars(spec), "folder": str(tmp_path)})
    pool = Pool(broken, FORM, workers=1, threads=1)
    try:
        pool.submit(part(0))
        with pytest.raises(ModelError):
            results(pool)
    finally:
        pool.close()


def test_workers_and_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchwright.map import pool

    monkeypatch.setattr(pool, "affinity", lambda: list(range(8)))
    assert shared_out(None, None, None) == (1, 8)
    assert shared_out(None, None, 2) == (4, 2)
    assert shared_out(None, None, 16) == (1, 8)
    assert shared_out(4, None, 8) == (4, 2)
    assert shared_out(None, 3, None) == (2, 3)
    with pytest.raises(WorkloadError, match="3 workers with 4 threads"):
        shared_out(3, 4, None)
