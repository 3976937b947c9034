"""A whole run with a task that needs no model: exact rows, in order, whatever ends it and wherever it goes on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from torchwright.core.errors import DataError, TorchwrightError, WorkloadError
from torchwright.map import run as map_run
from torchwright.map.compute import Computed, compute
from torchwright.map.model import MapModel
from torchwright.map.options import MapOptions, ModelOptions, TaskOptions
from torchwright.map.plan import Part
from torchwright.map.run import Job, Summary, run
from torchwright.map.tasks.base import Answer, Rejected, Task
from torchwright.map.tasks.texts import text_fault


class Backwards(Task):
    """Answers in another order than it is asked."""

    def answer(self, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Answer]]:
        for place in reversed(range(len(rows))):
            fault = text_fault(rows[place], "text")
            text = rows[place].get("text")
            yield place, Rejected(fault) if fault else {"embedding": [float(len(str(text))), 0.1]}


class Inline:
    """Computes parts in this process, the last first; ends the run after `most` parts."""

    def __init__(self, job: Job, most: int = 10**9) -> None:
        self.notices: list[str] = []
        self._job, self._most, self._held = job, most, list[Part]()
        self.computed = list[str]()

    def free(self) -> int:
        return 2 - len(self._held)

    def submit(self, part: Part) -> None:
        self._held.append(part)

    def running(self) -> int:
        return len(self._held)

    def finished(self, seconds: float) -> list[tuple[Part, Computed]]:
        if not self._held or (seconds == 0 and len(self._held) < 2):
            return []
        if len(self.computed) >= self._most:
            raise KeyboardInterrupt
        part = self._held.pop()
        self.computed.append(part.name)
        return [(part, compute(Backwards(), part, self._job.form))]

    def close(self) -> None:
        self._held.clear()


class Quiet:
    def begin(self, bytes_total: int | None) -> None: ...

    def advance(self, **_: Any) -> None: ...


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = MapModel(target="m", folder=tmp_path, artifact=None, kind="encoder", digest="d")
    monkeypatch.setattr(map_run, "find_model", lambda *_: found)


class World:
    """Runs of one input."""

    def __init__(self, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tmp, self._patch = tmp, monkeypatch
        self.executors = list[Inline]()

    def run(
        self, *inputs: Path, out: str = "out", most: int = 10**9, dry: bool = False, **options: Any
    ) -> Summary:
        def executor(job: Job) -> Inline:
            self.executors.append(Inline(job, most))
            return self.executors[-1]

        self._patch.setattr(Job, "executor", executor)
        return run(
            MapOptions(
                model=ModelOptions(model="m"),
                inputs=tuple(map(str, inputs)),
                out=self.tmp / out,
                **{"part_rows": 10, **options},
            ),
            Quiet(),
            lambda text: None,
            dry=dry,
        )

    @property
    def computed(self) -> list[str]:
        return [name for executor in self.executors for name in executor.computed]

    def answers(self, out: str = "out") -> list[dict[str, Any]]:
        place = self.tmp / out
        files = sorted(place.glob("part-*.jsonl")) if place.is_dir() else [place]
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: None) -> World:
    return World(tmp_path, monkeypatch)


def texts(path: Path, count: int) -> Path:
    rows = [{"id": f"r{n}", "text": "x" * (n + 1)} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def wanted(count: int) -> list[dict[str, Any]]:
    return [{"row": n, "id": f"r{n}", "embedding": [n + 1.0, 0.1]} for n in range(count)]


@pytest.mark.parametrize("out", ["out", "out.jsonl"])
def test_rows_come_out_in_the_order_of_the_input(world: World, tmp_path: Path, out: str) -> None:
    found = world.run(texts(tmp_path / "a.jsonl", 47), out=out)
    assert world.answers(out) == wanted(47)
    assert (found.rows, found.parts, found.joined, found.rejected) == (47, 5, True, 0)


def test_runs_that_end_anywhere_compute_each_part_once(world: World, tmp_path: Path) -> None:
    """At most what a worker held is lost; here the parts that were not given back."""
    draw, path = random.Random(0), texts(tmp_path / "a.jsonl", 203)
    for _ in range(100):
        try:
            found = world.run(path, most=draw.randint(0, 3), out="out.jsonl")
        except KeyboardInterrupt:
            continue
        break
    assert found.joined
    assert world.answers("out.jsonl") == wanted(203)
    assert len(world.computed) == len(set(world.computed)) == 21


def test_a_run_that_is_whole_computes_nothing_again(world: World, tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", 30)
    for out in ("out", "out.jsonl"):
        world.run(path, out=out)
        before = len(world.executors)
        found = world.run(path, out=out)
        assert len(world.executors) == before
        assert (found.rows, found.parts_there, found.joined) == (30, 3, True)


def test_an_input_that_grows_keeps_its_parts_in_a_folder_and_is_refused_for_a_file(
    world: World, tmp_path: Path
) -> None:
    path = texts(tmp_path / "a.jsonl", 25)
    world.run(path)
    world.run(path, out="out.jsonl")
    texts(path, 45)
    assert world.run(path).computed_parts == 3
    assert world.answers() == wanted(45)
    with pytest.raises(DataError, match="the input is another now, from row 20 on"):
        world.run(path, out="out.jsonl")
    world.run(path, out="out.jsonl", overwrite=True)
    assert world.answers("out.jsonl") == wanted(45)


def test_shards_share_the_parts_and_the_last_one_joins(world: World, tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", 68)
    found = [world.run(path, out="out.jsonl", shard=(place, 3)) for place in (2, 0, 1)]
    assert [one.joined for one in found] == [False, False, True]
    assert sum(one.computed_parts for one in found) == 7
    assert world.answers("out.jsonl") == wanted(68)
    assert len(world.computed) == len(set(world.computed))


def test_a_shard_that_comes_back_computes_nothing_that_another_has_joined(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A requeued shard, which looked for the joined file a moment before it was there."""
    path = texts(tmp_path / "a.jsonl", 68)
    for place in range(2):
        world.run(path, out="out.jsonl", shard=(place, 2))
    monkeypatch.setattr(map_run._Run, "_finished", lambda self: None)
    found = world.run(path, out="out.jsonl", shard=(0, 2))
    assert (found.computed_parts, found.joined, found.missing_parts) == (0, True, 0)
    assert world.answers("out.jsonl") == wanted(68)


def test_rejected_rows_are_named_with_their_reasons(world: World, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [
        '{"text": "ok"}',
        '{"text": ""}',
        "{",
        '{"text": null}',
        '{"text": NaN}',
        '{"text": "ok"}',
        '{"other": 1}',
    ]
    path.write_text("\n".join(rows) + "\n")
    found = world.run(path)
    assert [row["row"] for row in world.answers()] == [0, 5]
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [(row["row"], row["line"]) for row in rejected] == [(1, 2), (2, 3), (3, 4), (4, 5), (6, 7)]
    assert [row["reason"].split(":")[0] for row in rejected] == [
        "the text is empty",
        "no JSON",
        "there is no 'text'",
        "'text' is not a number (NaN), and a text is read",
        "there is no 'text'",
    ]
    assert (found.rejected, found.rows) == (5, 7)
    assert found.first_reason == "the text is empty"
    # Going on counts them again.
    assert world.run(path).rejected == 5


def test_strict_ends_with_the_first_rejected_row_also_of_an_earlier_run(world: World, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ok"}\n{"text": ""}\n')
    for _ in range(2):
        with pytest.raises(DataError, match="--strict ends the run"):
            world.run(path, strict=True)


def test_a_plan_counts_and_estimates_from_what_was_measured(world: World, tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", 100)
    plan = world.run(path, dry=True)
    assert (plan.rows, plan.missing_parts, plan.estimated_seconds) == (100, 10, None)
    assert not (tmp_path / "out").exists()
    world.run(path, limit=50)
    plan = world.run(path, dry=True)
    assert (plan.parts_there, plan.missing_parts, plan.missing_rows) == (5, 5, 50)
    assert plan.estimated_seconds
    assert world.run(path).computed_parts == 5
    assert world.answers() == wanted(100)


def test_a_limited_file_is_gone_on_with_by_the_whole(world: World, tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", 40)
    world.run(path, limit=20, out="out.jsonl")
    assert world.answers("out.jsonl") == wanted(20)
    assert world.run(path, out="out.jsonl").computed_parts == 2
    assert world.answers("out.jsonl") == wanted(40)


def test_several_inputs_say_which_is_a_rows_own(world: World, tmp_path: Path) -> None:
    world.run(texts(tmp_path / "a.jsonl", 3), texts(tmp_path / "b.jsonl", 2))
    files = [Path(row["file"]).name for row in world.answers()]
    assert files == ["a.jsonl"] * 3 + ["b.jsonl"] * 2
    assert [row["row"] for row in world.answers()] == [0, 1, 2, 3, 4]


def test_parquet_has_one_type_a_column(world: World, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.jsonl"
    rows = [{"id": n, "text": "x" * (n + 1), "tags": ["a", n]} for n in range(25)]
    rows[7]["id"] = "seven"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = world.run(path, out="out.parquet", task=TaskOptions(keep=("id", "tags")))
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.schema.names == ["row", "id", "tags", "embedding"]
    assert str(table.schema.field("embedding").type).startswith("list<")
    assert table["id"].to_pylist() == [n for n in range(25) if n != 7]
    assert json.loads(table["tags"][3].as_py()) == ["a", 3]
    assert found.rejected == 1
    assert "is not int, as in the first row" in found.first_reason


def test_missing_columns_are_listed_before_anything_is_computed(world: World, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("name,age,city\nA,1,B\n")
    with pytest.raises(DataError, match="columns name, age, city"):
        world.run(path)
    with pytest.raises(DataError, match="has no column 'txt'"):
        world.run(path, task=TaskOptions(text_column="txt"))
    texts(tmp_path / "a.jsonl", 2)
    (tmp_path / "b.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl has no column 'text'"):
        world.run(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert not world.executors


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"task": TaskOptions(all_labels=True)}, "--all-labels would change nothing"),
        ({"task": TaskOptions(request={"seed": 1})}, "options of generation would change nothing"),
        ({"shard": (3, 3)}, "--shard 3/3"),
        ({"shard": (1, 3), "overwrite": True}, "each shard would remove the parts of the others"),
        ({"inputs": ()}, "there is no input"),
    ],
)
def test_options_without_effect_are_refused(
    world: World, tmp_path: Path, options: dict[str, Any], wanted: str
) -> None:
    inputs = options.pop("inputs", (texts(tmp_path / "a.jsonl", 2),))
    with pytest.raises(TorchwrightError, match=wanted):
        world.run(*inputs, **options)


def test_an_input_without_rows_is_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="no rows"):
        world.run(tmp_path / "a.jsonl")


def test_duplicate_ids_keep_both_rows(world: World, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1, "text": "a"}\n{"id": 1, "text": "bb"}\n')
    world.run(tmp_path / "a.jsonl")
    assert [(row["row"], row["id"], row["embedding"][0]) for row in world.answers()] == [
        (0, 1, 1.0),
        (1, 1, 2.0),
    ]


def test_the_output_is_not_taken_from_another_task(world: World, tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", 2)
    world.run(path)
    with pytest.raises(WorkloadError, match="answers of another run"):
        world.run(path, task=TaskOptions(truncate=True))


def test_an_output_is_never_an_input(world: World, tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", 2)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "inner").mkdir()
    for inputs, out in (
        ((path,), "a.jsonl"),
        ((path,), "link/a.jsonl"),
        ((path,), "inner/../a.jsonl"),
        ((tmp_path,), "out"),
        ((tmp_path,), "inner/../link/out"),
    ):
        with pytest.raises(WorkloadError, match="is an input, has one among its files, or"):
            world.run(*inputs, out=out, overwrite=True)
    assert path.is_file()


def test_rejected_rows_are_no_input_of_their_own_run(world: World, tmp_path: Path) -> None:
    """--overwrite would remove them before they are read."""
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    for out, rejected in (("out.jsonl", "out.rejected.jsonl"), ("out", "out/rejected.jsonl")):
        world.run(tmp_path / "a.jsonl", out=out)
        with pytest.raises(WorkloadError, match="has one among its files"):
            world.run(tmp_path / rejected, out=out, overwrite=True)
        assert (tmp_path / rejected).is_file()


def test_numbers_that_json_writers_refuse_are_their_rows_fault(world: World, tmp_path: Path) -> None:
    rows = ['{"id": 1, "text": "a"}', f'{{"id": {2**70}, "text": "b"}}', '{"id": NaN, "text": "c"}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    found = world.run(tmp_path / "a.jsonl")
    assert [row["id"] for row in world.answers()] == [1, None]
    assert found.first_reason == "'id' is an integer of more than 64 bits"
