"""Parts as Ray tasks: two nodes on loopback, one of them killed in the middle."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from folders import encoder, sentence_transformer
from torchwright.core.errors import WorkloadError
from torchwright.map.cluster import Cluster
from torchwright.map.compute import Computed, OutputForm
from torchwright.map.options import ModelOptions, TaskOptions
from torchwright.map.plan import Part
from torchwright.map.sources import Record
from torchwright.map.tasks.base import TaskSpec

FORM = OutputForm(form="jsonl", fields={"embedding": "vector"})
PARTS = 12
ROWS = 800
"""In parts of four: a fifth of a second or more of two nodes, and a kill takes milliseconds."""
WAIT_SECONDS = 240.0
"""A busy machine takes long to start raylets and their workers."""


def spec_of(folder: Path) -> TaskSpec:
    return TaskSpec(
        task="embed",
        kind="encoder",
        folder=str(folder),
        artifact=None,
        model=ModelOptions(model=str(folder)),
        options=TaskOptions(text_column="text"),
    )


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(WorkloadError, match=r"pip install 'torchwright\[ray\]'"):
        Cluster("auto", spec_of(tmp_path), FORM, workers=None, threads=1)


@contextlib.contextmanager
def raylets(count: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Start so many nodes of a core each on loopback; yield their address and what kills the last one."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster as Nodes  # pyright: ignore[reportMissingImports]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "RAY_worker_niceness", "0"
        )  # 15 by default: on a busy machine workers do not get to open a model
        nodes = Nodes()
        try:
            last = [nodes.add_node(wait=False, num_cpus=1, include_dashboard=False) for _ in range(count)][-1]
            nodes.wait_for_nodes(timeout=WAIT_SECONDS)
            assert nodes.address is not None
            yield nodes.address, lambda: nodes.remove_node(last, allow_graceful=False)
        finally:
            nodes.shutdown()


def stand_in(first: Callable[[Part], None]) -> Callable[[object, Part], tuple[Computed, list[str]]]:
    """A task that needs no model: it calls `first`, and answers with the rows' places.

    Ray takes it as it stands here, because its workers cannot import this file.
    """

    def computed(shared: object, part: Part) -> tuple[Computed, list[str]]:
        first(part)
        rows = len(part.records)
        answers = b"".join(b'{"row": %d}\n' % (part.first_row + place) for place in range(rows))
        return Computed(
            index=part.index, answers=answers, rejected=b"", rows=rows, rejected_rows=0, seconds=0.0
        ), []

    return computed


@pytest.mark.slow  # two raylets
@pytest.mark.filterwarnings("default")
def test_a_node_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    found, killed = dict[int, bytes](), False
    waiting = [part(index) for index in range(PARTS)]
    with raylets(2) as (address, kill):
        cluster = Cluster(address, spec_of(tmp_path), FORM, workers=None, threads=1)
        # Both nodes have parts under way when one of them dies.
        work = stand_in(lambda part: time.sleep(0.5))
        cluster._remote = cluster._ray.remote(num_cpus=1, max_retries=0)(work)
        until = time.monotonic() + WAIT_SECONDS
        try:
            while (waiting or cluster.running()) and time.monotonic() < until:
                while waiting and cluster.free() > 0:
                    cluster.submit(waiting.pop(0))
                for one, computed in cluster.finished(0.2):
                    assert one.index not in found
                    found[one.index] = computed.answers
                if len(found) >= 3 and not killed:
                    kill()
                    killed = True
        finally:
            cluster.close()
    assert killed
    assert sorted(found) == list(range(PARTS))
    assert [json.loads(line)["row"] for index in range(PARTS) for line in found[index].splitlines()] == list(
        range(2 * PARTS)
    )


@pytest.mark.slow  # two raylets, their workers, the command and a run without Ray start torch
@pytest.mark.filterwarnings("default")
def test_the_command_goes_on_when_a_node_is_killed(tmp_path: Path) -> None:
    """Every row is there once, and no part that was there is written again."""
    folder = sentence_transformer(tmp_path / "encoder", encoder(), pooling={"pooling_mode_mean_tokens": True})
    source, out, alone = tmp_path / "in.jsonl", tmp_path / "out", tmp_path / "alone"
    rows = [{"id": number, "text": f"row {number} " * (1 + number % 7)} for number in range(ROWS)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "torchwright", "map", str(folder), str(source), "--part-rows", "4"]
    command += ["--threads", "1"]
    subprocess.run([*command, "-o", str(alone)], check=True)
    with raylets(2) as (address, kill):
        process = subprocess.Popen([*command, "-o", str(out), "--ray", address])
        try:
            end = time.monotonic() + WAIT_SECONDS
            while len(before := stamps(out)) < 5 and process.poll() is None and time.monotonic() < end:
                time.sleep(0.02)
            kill()
            assert len(stamps(out)) < ROWS // 4, "all was done before the node died"
            assert process.wait(WAIT_SECONDS) == 0
        finally:
            process.kill()
            process.wait()
    assert len(before) >= 5
    assert stamps(out).items() >= before.items()
    assert joined(out) == joined(alone)
    assert [json.loads(line)["id"] for line in joined(out).splitlines()] == list(range(ROWS))


def stamps(folder: Path) -> dict[str, int]:
    """Return when each part was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*.jsonl")}


def joined(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("part-*.jsonl")))


@pytest.mark.slow  # a raylet, and a worker for each death
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("leave", [os._exit, sys.exit])
def test_a_row_that_ends_its_worker_is_rejected(leave: Callable[[int], None], tmp_path: Path) -> None:
    """A crash, and a library that ends the program as if all was well."""

    def dies(part: Part) -> None:
        if any(record.raw == b"dies" for record in part.records):
            leave(0)

    records = [Record(line, text) for line, text in enumerate((b"one", b"dies", b"three"), 1)]
    whole = Part(index=0, source="a", kind="text", first_row=0, records=records)
    found = list[tuple[Part, Computed]]()
    with raylets(1) as (address, _):
        cluster = Cluster(address, spec_of(tmp_path), FORM, workers=None, threads=1)
        cluster._remote = cluster._ray.remote(num_cpus=1, max_retries=0)(stand_in(dies))
        until = time.monotonic() + WAIT_SECONDS
        try:
            cluster.submit(whole)
            while cluster.running() and time.monotonic() < until:
                found += cluster.finished(0.2)
        finally:
            cluster.close()
    [(part, answer)] = found
    assert part is whole
    assert [json.loads(line)["row"] for line in answer.answers.splitlines()] == [0, 2]
    assert json.loads(answer.rejected)["reason"].startswith("twice, its worker died")


def part(index: int) -> Part:
    records = [Record(1, b"one"), Record(2, b"two %d" % index)]
    return Part(index=index, source="a", kind="text", first_row=2 * index, records=records)
