"""Inputs of `torchwright map`: what each format yields, and what is wrong with a row said in the row."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from torchwright.core.errors import DataError
from torchwright.core.rows import LONGEST_LINE
from torchwright.map.sources import PICTURES, SOUNDS, Source, open_sources, parse

NONE: frozenset[str] = frozenset()


def read(source: Source) -> list[tuple[int, Any]]:
    """The line and the values of each row, or its fault."""
    found = [parse(record, source.kind) for record in source.records()]
    return [(row.number, row.fault or row.values) for row in found]


def one(path: Path, **options: Any) -> list[tuple[int, Any]]:
    [source] = open_sources([str(path)], options.get("form"), options.get("media", NONE))
    return read(source)


def test_lines_of_json_with_a_byte_order_mark_carriage_returns_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n   \n{"text": "tw\xc3\xb6"}\n{"text": "three"}')
    assert one(path) == [(1, {"text": "one"}), (4, {"text": "twö"}), (5, {"text": "three"})]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_only_a_line_feed_ends_a_row(tmp_path: Path, name: str) -> None:
    """str.splitlines takes eight more characters for line ends, which JSON leaves as they are within a text."""
    text = "a\u2028b\u2029c\x85d\x1ce\x0bf\x0cg"
    assert len(text.splitlines()) == 7
    line = json.dumps({"text": text}, ensure_ascii=False)
    (tmp_path / name).write_text((line if name == "a.jsonl" else text) + "\nlast", "utf-8")
    [(first, values), (second, _)] = one(tmp_path / name)
    assert (first, values, second) == (1, {"text": text}, 2)


def test_a_broken_line_is_a_fault_of_its_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": \n[1]\n{"text": "\xff"}\n{"text": "last"}\n')
    found = one(path)
    assert [line for line, _ in found] == [1, 2, 3, 4, 5]
    assert "no JSON" in found[1][1]
    assert "no object" in found[2][1]
    assert "no UTF-8" in found[3][1]
    assert found[4][1] == {"text": "last"}


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.truncate(LONGEST_LINE + 100)  # a hole
        file.seek(0, os.SEEK_END)
        file.write(b"\nshort\n")
    assert one(path) == [(1, f"the line has more than {LONGEST_LINE:,} bytes"), (2, {"text": "short"})]


def test_text_compressed_and_plain_are_the_same(tmp_path: Path) -> None:
    data = b"first line\n\nthird, with\ttabs\n"
    (tmp_path / "a.txt").write_bytes(data)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(data))
    assert one(tmp_path / "a.txt") == one(tmp_path / "b.txt.gz")


def test_a_compressed_file_that_was_cut_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % (n * 7919) for n in range(5000)))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read to its end"):
        one(path)


def test_a_table_goes_on_with_the_columns_that_are_wanted(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,text,rest\n1,"one, with\na break",x\n2,two\n')
    [source] = open_sources([str(path)], None, NONE)
    assert source.peek() == {"id": "1", "text": "one, with\na break", "rest": "x"}
    source.columns = ("text",)
    found = read(source)
    assert found[0][1] == {"text": "one, with\na break"}
    assert "2 fields in place of 3" in found[1][1]


def test_parquet_with_nulls_dates_and_numbers_that_are_none(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import datetime

    import pyarrow.parquet

    table = arrow.table(
        {
            "text": ["one", None],
            "when": [datetime.date(2026, 1, 2), None],
            "score": [float("nan"), 1.5],
            "raw": [b"\x00", b"\x01"],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    [source] = open_sources([str(tmp_path / "a.parquet")], None, NONE)
    source.columns = ("text", "when", "score")
    first, second = (row for _, row in read(source))
    assert first["when"] == "2026-01-02"
    assert first["score"] != first["score"]
    assert second["text"] is None
    [source] = open_sources([str(tmp_path / "a.parquet")], None, NONE)
    with pytest.raises(DataError, match="column of bytes"):
        read(source)


def test_the_first_row_is_looked_at_and_still_given(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('broken\n{"text": "one"}\n{"text": "two"}\n')
    [source] = open_sources([str(path)], None, NONE)
    assert source.peek() == {"text": "one"}
    assert source.peek() == {"text": "one"}
    assert [line for line, _ in read(source)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("data", "kind", "wanted"),
    [
        (b'\xef\xbb\xbf{"text": "one"}\n', "json", {"text": "one"}),
        (b"one\n", "text", {"text": "one"}),
    ],
)
def test_standard_input_is_told_apart_by_its_first_byte(
    monkeypatch: pytest.MonkeyPatch, data: bytes, kind: str, wanted: dict[str, str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))  # type: ignore[arg-type]
    [source] = open_sources(["-"], None, NONE)
    assert source.kind == kind
    assert read(source) == [(1, wanted)]


def test_a_folder_is_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "notes.pdf", ".hidden.txt"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "c.txt").write_text("no\n")
    sources = open_sources([str(tmp_path)], None, NONE)
    assert [Path(source.label).name for source in sources] == ["a.jsonl", "b.txt"]


def test_a_folder_of_pictures_is_one_source_of_paths(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("in/b.PNG", "a.jpg", "readme.txt"):
        (tmp_path / name).write_bytes(b"x")
    [source] = open_sources([str(tmp_path)], None, PICTURES)
    assert [row["file"] for _, row in read(source)] == [
        str(tmp_path / "a.jpg"),
        str(tmp_path / "in" / "b.PNG"),
    ]


def test_a_file_that_changed_is_another_record(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(b"x")
    raws = []
    for stamp in (1, 2):
        os.utime(path, ns=(stamp, stamp))
        [source] = open_sources([str(path)], None, SOUNDS)
        raws.append(next(source.records()).raw)
    assert raws[0] != raws[1]


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("missing.jsonl", "there is no file"),
        ("https://example.org/a.jsonl", "nothing is downloaded"),
        ("a.log", "--input-format"),
        ("empty", "holds no file that is read"),
    ],
)
def test_what_cannot_be_an_input_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, wanted: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.log").write_text("x\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=wanted):
        open_sources([word], None, NONE)
    if word == "a.log":
        assert one(tmp_path / word, form="text") == [(1, {"text": "x"})]


def test_how_much_was_read_grows_to_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(2000)))
    [source] = open_sources([str(path)], None, NONE)
    seen = [source.read for _ in source.records()]
    assert seen == sorted(seen)
    assert source.read == source.size == path.stat().st_size
