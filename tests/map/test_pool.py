"""Worker processes: parts come back from all of them, and a worker that is killed is replaced."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from folders import encoder, sentence_transformer
from torchwright.core.cpu_load import affinity
from torchwright.core.errors import ModelError, WorkloadError
from torchwright.map.compute import Computed, OutputForm
from torchwright.map.options import ModelOptions, TaskOptions
from torchwright.map.plan import Part
from torchwright.map.pool import Pool, shared_out
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


@pytest.mark.slow
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


DEADLY = (sys.executable, str(Path(__file__).with_name("deadly_worker.py")))
"""Workers that the text `dies` ends, and that the text `sleeps` keeps for ever."""


@pytest.fixture
def deadly() -> TaskSpec:
    """A task that needs no model."""
    options = TaskOptions(text_column="text")
    return TaskSpec(
        task="embed", kind="encoder", folder="", artifact=None, model=ModelOptions(), options=options
    )


def computed(deadly: TaskSpec, form: OutputForm, *texts: str, **more: Any) -> tuple[Computed, list[str]]:
    """The one part of some texts, and what the user is told meanwhile."""
    pool = Pool(deadly, form, workers=1, threads=1, command=DEADLY, **more)
    records = [Record(line, text.encode()) for line, text in enumerate(texts, 1)]
    whole = Part(index=0, source="a", kind="text", first_row=0, records=records)
    try:
        pool.submit(whole)
        [(found, answer)] = results(pool)
        assert found is whole
        return answer, pool.notices
    finally:
        pool.close()


def test_a_row_that_ends_its_workers_is_rejected_and_the_others_are_answered(deadly: TaskSpec) -> None:
    found, notices = computed(deadly, FORM, "a", "dies", "ccc", "dddd", "eeeee")
    assert [json.loads(line) for line in found.answers.splitlines()] == [
        {"row": row, "embedding": [row + 1.0]} for row in (0, 2, 3, 4)
    ]
    fault = json.loads(found.rejected)
    assert (fault["row"], fault["line"], fault["input"]) == (1, 2, "dies")
    assert fault["reason"].startswith("twice, its worker died")
    assert (found.rows, found.rejected_rows, found.reason) == (5, 1, fault["reason"])
    assert len(notices) == 3  # of five rows, of two, of one


@pytest.mark.slow
def test_a_row_that_takes_too_long_is_rejected_after_its_part_was_halved(deadly: TaskSpec) -> None:
    found, _ = computed(deadly, FORM, "a", "bb", "sleeps", part_seconds=1.0)
    assert [json.loads(line)["row"] for line in found.answers.splitlines()] == [0, 1]
    assert json.loads(found.rejected)["reason"] == "twice, it took longer than 1 s"


@pytest.mark.slow
def test_halves_are_joined_in_parquet_too(deadly: TaskSpec) -> None:
    form = OutputForm(form="parquet", fields={"embedding": "vector"})
    found, _ = computed(deadly, form, "dies", "bb", "ccc")
    table = parquet.read_table(io.BytesIO(found.answers)).to_pylist()
    assert table == [{"row": 1, "embedding": [2.0]}, {"row": 2, "embedding": [3.0]}]


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


@pytest.mark.slow
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


def test_workers_and_threads_share_the_cores() -> None:
    assert shared_out(None, None, None, cores=8) == (1, 8)
    assert shared_out(None, None, 2, cores=8) == (4, 2)
    assert shared_out(None, None, 16, cores=8) == (1, 8)
    assert shared_out(4, None, 8, cores=8) == (4, 2)
    assert shared_out(None, 3, None, cores=8) == (2, 3)
    with pytest.raises(WorkloadError, match="3 workers with 4 threads"):
        shared_out(3, 4, None, cores=8)
