"""Parts as Ray tasks: two nodes on loopback, one of them killed in the middle."""

from __future__ import annotations

import json
import os
import time
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


@pytest.mark.slow  # two raylets, and workers that start torch
@pytest.mark.filterwarnings("default")
def test_a_node_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster as Nodes  # pyright: ignore[reportMissingImports]

    folder = sentence_transformer(tmp_path, encoder(), pooling={"pooling_mode_mean_tokens": True})
    nodes = Nodes()
    nodes.add_node(num_cpus=1, include_dashboard=False)
    second = nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    cluster = Cluster(nodes.address, spec_of(folder), FORM, workers=None, threads=1)
    found, killed, until = dict[int, bytes](), False, time.monotonic() + 240
    waiting = [part(index) for index in range(PARTS)]
    try:
        while (waiting or cluster.running()) and time.monotonic() < until:
            while waiting and cluster.free() > 0:
                cluster.submit(waiting.pop(0))
            for one, computed in cluster.finished(0.2):
                assert one.index not in found
                found[one.index] = computed.answers
            if len(found) >= 3 and not killed:
                nodes.remove_node(second, allow_graceful=False)
                killed = True
    finally:
        cluster.close()
        nodes.shutdown()
    assert killed
    assert sorted(found) == list(range(PARTS))
    assert [json.loads(line)["row"] for index in range(PARTS) for line in found[index].splitlines()] == list(
        range(2 * PARTS)
    )


@pytest.mark.slow  # a raylet, and a worker for each death
@pytest.mark.filterwarnings("default")
def test_a_row_that_ends_its_worker_is_rejected(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster as Nodes  # pyright: ignore[reportMissingImports]

    def computed(shared: object, part: Part) -> tuple[Computed, list[str]]:
        if any(record.raw == b"dies" for record in part.records):
            os._exit(1)
        places = range(part.first_row, part.first_row + len(part.records))
        answers = b"".join(b'{"row": %d}\n' % place for place in places)
        rows = len(part.records)
        return Computed(
            index=part.index, answers=answers, rejected=b"", rows=rows, rejected_rows=0, seconds=0.0
        ), []

    nodes = Nodes()
    nodes.add_node(num_cpus=1, include_dashboard=False)
    cluster = Cluster(nodes.address, spec_of(tmp_path), FORM, workers=None, threads=1)
    cluster._remote = cluster._ray.remote(num_cpus=1, max_retries=0)(computed)
    records = [Record(line, text) for line, text in enumerate((b"one", b"dies", b"three"), 1)]
    whole = Part(index=0, source="a", kind="text", first_row=0, records=records)
    found, until = list[tuple[Part, Computed]](), time.monotonic() + 240
    try:
        cluster.submit(whole)
        while cluster.running() and time.monotonic() < until:
            found += cluster.finished(0.2)
    finally:
        cluster.close()
        nodes.shutdown()
    [(part, answer)] = found
    assert part is whole
    assert [json.loads(line)["row"] for line in answer.answers.splitlines()] == [0, 2]
    assert json.loads(answer.rejected)["reason"].startswith("twice, its worker died")


def part(index: int) -> Part:
    records = [Record(1, b"one"), Record(2, b"two %d" % index)]
    return Part(index=index, source="a", kind="text", first_row=2 * index, records=records)
