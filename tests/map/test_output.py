"""The place of the answers: taken by one run, gone on with by the same, refused to another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from torchwright.core.errors import WorkloadError
from torchwright.map import output as outputs
from torchwright.map.output import Output

JOB: dict[str, Any] = {"task": "embed", "options": {"truncate": False, "keep": ("id",)}}


def opened(path: Path, job: dict[str, Any] = JOB, **options: Any) -> Output:
    output = Output(path, None)
    output.open(job, **{"overwrite": False, **options})
    return output


def test_the_same_run_goes_on_and_another_is_refused_by_what_differs(tmp_path: Path) -> None:
    output = opened(tmp_path / "out")
    output.write("part-00000000-a", b"{}\n", b"")
    assert opened(tmp_path / "out").has("part-00000000-a")
    other = {"task": "embed", "options": {"truncate": True, "keep": ("id",)}}
    with pytest.raises(WorkloadError, match=r"options\.truncate was false and is true"):
        opened(tmp_path / "out", other)
    assert not opened(tmp_path / "out", other, overwrite=True).has("part-00000000-a")


@pytest.mark.parametrize("name", ["out", "out.jsonl"])
def test_files_of_others_are_neither_taken_nor_removed(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    mine = place if place.suffix else place / "thesis.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(WorkloadError, match="no run of `torchwright map` wrote it"):
        opened(place)
    assert mine.read_text() == "mine"
    if not place.suffix:  # --overwrite of a folder leaves what is not ours
        opened(place, overwrite=True)
        assert mine.read_text() == "mine"


def test_parts_are_joined_in_order_and_go(tmp_path: Path) -> None:
    output = opened(tmp_path / "a.jsonl")
    output.write("part-00000001-b", b"2\n", b"bad 2\n")
    output.write("part-00000000-a", b"0\n1\n", b"bad 1\n")
    names = ["part-00000000-a", "part-00000001-b"]
    output.join(names, keep=False)
    assert (tmp_path / "a.jsonl").read_bytes() == b"0\n1\n2\n"
    assert (tmp_path / "a.rejected.jsonl").read_bytes() == b"bad 1\nbad 2\n"
    assert sorted(path.name for path in (tmp_path / "a.jsonl.parts").iterdir()) == [
        "finished.json",
        "run.json",
    ]
    assert opened(tmp_path / "a.jsonl").finished == names


@pytest.mark.parametrize("rejected", [b"", b"bad\n"])
def test_shards_that_join_after_each_other_leave_the_rejected_rows(tmp_path: Path, rejected: bytes) -> None:
    first, second = opened(tmp_path / "a.jsonl"), opened(tmp_path / "a.jsonl")
    names = ["part-00000000-a", "part-00000001-b"]
    first.write(names[0], b"0\n", rejected)
    first.write(names[1], b"1\n", b"")
    for output in (first, second):
        output.join(names, keep=False)
        assert (tmp_path / "a.jsonl").read_bytes() == b"0\n1\n"
        assert (output.rejected.read_bytes() if rejected else b"") == rejected
        assert output.rejected.exists() == bool(rejected)


def test_shards_that_join_at_once_leave_the_rejected_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One finishes while the other has read a part of them."""
    first, second = opened(tmp_path / "a.jsonl"), opened(tmp_path / "a.jsonl")
    names = ["part-00000000-a", "part-00000001-b"]
    first.write(names[0], b"0\n", b"bad 0\n")
    first.write(names[1], b"1\n", b"bad 1\n")
    whole, concatenate = (tmp_path / "a.rejected.jsonl"), outputs._concatenate

    def interrupted(parts: Sequence[Path], to: Path) -> None:
        monkeypatch.setattr(outputs, "_concatenate", concatenate)
        concatenate(parts[:1], to)  # its list was made while parts were going
        first.join(names, keep=False)

    monkeypatch.setattr(outputs, "_concatenate", interrupted)
    second.join(names, keep=False)
    assert whole.read_bytes() == b"bad 0\nbad 1\n"
    assert (tmp_path / "a.jsonl").read_bytes() == b"0\n1\n"


def test_a_limited_run_keeps_every_part(tmp_path: Path) -> None:
    output = opened(tmp_path / "out")
    for name in ("part-00000000-a", "part-00000001-b"):
        output.write(name, b"x\n", b"")
    output.join(["part-00000000-a"], keep=True)
    assert output.has("part-00000001-b")
    output.join(["part-00000000-a"], keep=False)
    assert not output.has("part-00000001-b")


def test_a_part_without_rejected_rows_forgets_those_of_a_run_that_was_killed(tmp_path: Path) -> None:
    output = opened(tmp_path / "out")
    (tmp_path / "out" / "part-00000000-a.rejected").write_bytes(b"bad\n")
    output.write("part-00000000-a", b"x\n", b"")
    assert output.rejected_rows("part-00000000-a") == 0


@pytest.mark.parametrize(
    ("name", "form", "wanted"),
    [("a.csv", None, "does not say a format"), ("a.jsonl", "parquet", "does not fit")],
)
def test_a_name_says_the_format(tmp_path: Path, name: str, form: Any, wanted: str) -> None:
    with pytest.raises(WorkloadError, match=wanted):
        Output(tmp_path / name, form)


def test_a_plan_alone_writes_nothing(tmp_path: Path) -> None:
    Output(tmp_path / "out", None).open(JOB, overwrite=False, write=False)
    assert not (tmp_path / "out").exists()


def test_a_shard_that_comes_second_finds_the_answers_joined(tmp_path: Path) -> None:
    """Two shards end at the same time: both find every part, and one removes what the other reads."""
    first, second = opened(tmp_path / "a.jsonl"), opened(tmp_path / "a.jsonl")
    first.write("part-00000000-a", b"0\n", b"")
    first.join(["part-00000000-a"], keep=False)
    second.join(["part-00000000-a"], keep=False)
    second.note(rows=1)
    assert opened(tmp_path / "a.jsonl").finished == ["part-00000000-a"]
    assert (tmp_path / "a.jsonl").read_bytes() == b"0\n"
    with pytest.raises(FileNotFoundError):
        second.join(["part-00000000-b"], keep=False)


def test_shards_that_start_together_share_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".run.json.123.abcd").touch()
    opened(tmp_path / "out")


def test_measurements_of_shards_add_up(tmp_path: Path) -> None:
    first, second = opened(tmp_path / "out"), opened(tmp_path / "out")
    first.note(rows=3, worker_seconds=1.5)
    second.note(rows=4, worker_seconds=0.5)
    assert opened(tmp_path / "out").measured == {"rows": 7, "worker_seconds": 2.0}
