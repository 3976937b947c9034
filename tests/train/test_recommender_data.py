"""A recommender's files: each value against a slow reading by hand, broken rows by line, forms that say the same."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recommender_runs import make_recommender

from clicks import Shape, generate
from torchwright.core.errors import TorchwrightError, UnknownName
from torchwright.train.data.documents import FileReport
from torchwright.train.data.shards import DataError
from torchwright.train.recommender.columns import Columns
from torchwright.train.recommender.config import CATEGORIES, NUMBERS, read_recommender
from torchwright.train.recommender.reading import read_blocks
from torchwright.train.recommender.store import RowStream, convert_file
from torchwright.train.recommender.survey import survey

CRITEO = Columns(
    labelled=True,
    numbers=tuple(NUMBERS),
    tables=tuple((name, 10 + 7 * place) for place, name in enumerate(CATEGORIES)),
    hexadecimal=True,
)
PAIRS = Columns(
    labelled=False, numbers=(), tables=(("user", 50), ("kind", 9), ("item", 30)), hexadecimal=False
)
WHOLE = "\t".join(["1", *["3"] * 13, *["00ff"] * 26])


def read(path: Path, columns: Columns = CRITEO, *, header: bool = False) -> tuple[np.ndarray, FileReport]:
    report = FileReport()
    return np.concatenate(list(read_blocks(path, columns, report, header=header, strict=False))), report


def test_values_are_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    generate(path, "criteo", 500, seed=3)
    rows, report = read(path)
    told = rows.view(np.float32)
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    assert (report.rows, report.documents, report.broken) == (500, 500, 0)
    for line, row, numbers in zip(lines, rows, told, strict=True):
        assert numbers[0] == float(line[0])
        for place in range(13):
            wanted = math.log(1 + max(0.0, float(line[1 + place] or 0)))
            assert numbers[1 + place] == pytest.approx(wanted, rel=1e-6)
        for place, (_, size) in enumerate(CRITEO.tables):
            text = line[14 + place]
            assert row[14 + place] == (1 + int(text, 16) % (size - 1) if text else 0)
    assert any("" in line[1:14] for line in lines)
    assert any("" in line[14:] for line in lines)


@pytest.mark.parametrize("shape", ["criteo", "pairs"])
def test_forms_say_the_same(tmp_path: Path, shape: Shape) -> None:
    pytest.importorskip("pyarrow", reason="writes and reads Parquet")
    columns = CRITEO if shape == "criteo" else PAIRS
    found = []
    for name in ("a.tsv", "b.tsv.gz", "c.parquet"):
        generate(tmp_path / name, shape, 200, first=16_300)  # over the end of a block
        found.append(read(tmp_path / name, columns, header=shape == "pairs")[0])
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
    if shape == "pairs":
        user, _, item, kind = (tmp_path / "a.tsv").read_text().splitlines()[1].split("\t")
        hashes = [
            1 + zlib.crc32(text.encode()) % (size - 1) for text, size in ((user, 50), (kind, 9), (item, 30))
        ]
        assert found[0][0, 1:].tolist() == hashes, "columns are found by their names"


def test_parquet_with_whole_numbers_as_floats(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="writes and reads Parquet")
    parquet = pytest.importorskip("pyarrow.parquet", reason="writes and reads Parquet")
    columns = Columns(labelled=True, numbers=("n",), tables=(("c", 50),), hexadecimal=True)
    table = {"label": [1.0, 0.0, 0.5], "n": [2.0, math.nan, 1.0], "c": [12.0, None, 3.0], "more": [[1]] * 3}
    parquet.write_table(pa.table(table), tmp_path / "a.parquet")
    rows, report = read(tmp_path / "a.parquet", columns)
    assert rows.view(np.float32)[:, :2].tolist() == [[1.0, pytest.approx(math.log(3))], [0.0, 0.0]]
    assert rows[:, 2].tolist() == [1 + 0x12, 0]
    assert report.listed == [(3, "'label' is '0.5', which is neither 0 nor 1")]


def test_a_row_is_the_same_however_it_is_asked_for(tmp_path: Path) -> None:
    generate(tmp_path / "whole.tsv", "criteo", 300, first=100)
    generate(tmp_path / "part.tsv", "criteo", 50, first=200)
    whole = (tmp_path / "whole.tsv").read_text().splitlines()
    assert (tmp_path / "part.tsv").read_text().splitlines() == whole[100:150]


BROKEN = {
    "2\t" + WHOLE[2:]: "'label' is '2'",
    WHOLE.replace("\t3\t", "\tx\t", 1): "'I1' is 'x', which is no number",
    WHOLE.replace("\t3\t", "\tnan\t", 1): "'I1' is 'nan', which is no number",
    WHOLE.replace("00ff", "-5", 1): "'C1' is '-5', which is no hexadecimal number",
    WHOLE + "\t1": "41 fields in place of 40",
    "1\t2": "2 fields in place of 40",
    "1" * (1 << 17): "the line has more than 65,536 bytes",
}


def test_broken_rows_are_listed_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv.gz"
    lines = [part for line in BROKEN for part in (WHOLE, line)]
    with gzip.open(path, "wb") as file:
        file.write(("\n".join(lines) + "\n\n").encode() + b"\xff\n" + WHOLE.encode() + b"\r")
    rows, report = read(path)
    assert len(rows) == report.documents == len(BROKEN) + 1
    assert report.broken == len(BROKEN) + 1
    for (number, reason), (place, wanted) in zip(report.listed[:-1], enumerate(BROKEN.values()), strict=True):
        assert number == 2 * place + 2
        assert wanted in reason
    assert report.listed[-1] == (2 * len(BROKEN) + 2, "no UTF-8: invalid start byte at byte 0")
    with pytest.raises(DataError, match=r"line 2 of .* is broken"):
        list(read_blocks(path, CRITEO, FileReport(), header=False, strict=True))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    generate(tmp_path / "whole.tsv.gz", "criteo", 2000)
    content = (tmp_path / "whole.tsv.gz").read_bytes()
    (tmp_path / "cut.tsv.gz").write_bytes(content[: len(content) // 2])
    (tmp_path / "no.tsv.gz").write_bytes(b"not gzip")
    (tmp_path / "empty.tsv").write_bytes(b"")
    (tmp_path / "all.tsv").write_text("1\n2\n")
    for name, found in (("cut.tsv.gz", "cannot be read"), ("no.tsv.gz", "cannot be read")):
        with pytest.raises(DataError, match=found):
            read(tmp_path / name)
    for name in ("empty.tsv", "all.tsv"):
        with pytest.raises(DataError, match="holds no row"):
            read(tmp_path / name)
    (tmp_path / "named.tsv").write_text("user\titm\tkind\na\tb\tc\n")
    with pytest.raises(UnknownName, match="did you mean 'itm'"):
        read(tmp_path / "named.tsv", PAIRS, header=True)
    with pytest.raises(DataError, match="no known form"):
        convert_file(tmp_path / "x.csv", CRITEO, tmp_path, header=False, strict=False)


def test_converted_rows_are_kept_and_made_again_when_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(f"{WHOLE}\n1\n{WHOLE}\n")
    made, report = convert_file(path, CRITEO, tmp_path / "rows", header=False, strict=False)
    before = made.stat().st_mtime_ns
    again, kept = convert_file(path, CRITEO, tmp_path / "rows", header=False, strict=False)
    assert (again, kept, made.stat().st_mtime_ns) == (made, report, before)
    whole = made.read_bytes()
    made.write_bytes(whole[:40])
    assert convert_file(path, CRITEO, tmp_path / "rows", header=False, strict=False)[0].read_bytes() == whole
    with pytest.raises(DataError, match="line 2"):
        convert_file(path, CRITEO, tmp_path / "rows", header=False, strict=True)


def test_rows_go_on_from_file_to_file_and_begin_again() -> None:
    rng = np.random.default_rng()
    sizes = rng.integers(1, 9, 5)
    whole = rng.integers(0, 99, (sizes.sum(), CRITEO.width)).astype(np.int32)
    rows = RowStream(np.split(whole, sizes.cumsum()[:-1]), CRITEO)
    assert len(rows) == len(whole)
    for _ in range(20):
        first, count = rng.integers(0, [200, 100]).tolist()
        assert np.array_equal(rows.take(first, count), whole[(first + np.arange(count)) % len(whole)])


def test_data_check_sees_what_training_reads(tmp_path: Path) -> None:
    run = make_recommender(tmp_path)
    with gzip.open(tmp_path / "train.tsv.gz", "ab") as file:
        file.write(b"broken\n")
    (tmp_path / "held.tsv").write_text("broken\n")
    train, held = survey(read_recommender(run), tmp_path)
    assert (train.report.rows, train.report.documents, train.report.listed[0][0]) == (301, 300, 301)
    assert "holds no row" in str(held.refused)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"dlrm": {"botom": [3]}}, "did you mean 'dlrm.bottom'"),
        ({"dlrm": {"tables": {"C99": 10}}}, "names 'C99'"),
        ({"dlrm": {"rows": 1}}, "greater than or equal to 2"),
        ({"two_tower": {"user": {"a": 9}, "item": {"b": 9}}}, "either"),
        ({"evaluation": {"every_steps": 3}, "embeddings": {"sync_every": 2}}, "between two syncs"),
        ({"data": {"train": ["train.tsv.gz"]}, "evaluation": {"every_steps": 2}}, "nothing to evaluate"),
    ],
)
def test_run_files_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], wanted: str) -> None:
    run = make_recommender(tmp_path, **changes)
    with pytest.raises(TorchwrightError) as error:
        read_recommender(run)
    assert wanted in str(error.value)


def test_the_run_files_of_the_page_are_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "recommenders.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    dlrm, copies, towers = blocks
    for text in (dlrm, dlrm + copies, towers):
        (tmp_path / "run.toml").write_text(text)
        assert read_recommender(tmp_path / "run.toml").kind == "recommender"
