"""Files that are written beside their place and renamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchwright.errors import WorkloadError
from torchwright.process.files import check_writable, replacing


def test_what_the_block_writes_takes_the_files_place(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with replacing(path) as beside:
        beside.write_text("new")
        assert path.read_text() == "old"
    assert (path.read_text(), list(tmp_path.iterdir())) == ("new", [path])


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as beside:
            beside.write_text("half of it")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])


def test_a_folder_to_be_is_tried_where_it_would_lie(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("keep")
    check_writable(tmp_path / "not" / "there" / "yet")
    check_writable(Path("."))
    for bad in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        with pytest.raises(WorkloadError, match=r"nothing can be written.*choose another place with -o"):
            check_writable(bad)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
