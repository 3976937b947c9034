"""Files that are written beside their place and renamed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchwright.core import system
from torchwright.core.errors import WorkloadError
from torchwright.core.process.files import check_writable, open_own, replacing


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


def test_a_link_in_the_place_of_the_new_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious, path = tmp_path / "precious", tmp_path / "a.json"
    precious.write_text("keep")
    monkeypatch.setattr("secrets.token_hex", lambda count: "known")
    (tmp_path / f".a.json.{os.getpid()}.known").symlink_to(precious)
    with pytest.raises(FileExistsError), replacing(path) as beside:
        beside.write_text("new")
    assert precious.read_text() == "keep"


def test_a_link_in_the_place_of_the_target_is_replaced_and_not_followed(tmp_path: Path) -> None:
    precious, path = tmp_path / "precious", tmp_path / "a.json"
    precious.write_text("keep")
    path.symlink_to(precious)
    with replacing(path) as beside:
        beside.write_text("new")
    assert (precious.read_text(), path.read_text(), path.is_symlink()) == ("keep", "new", False)


@pytest.mark.parametrize("kind", ["link", "dangling link"])
def test_a_file_that_is_written_in_place_is_no_link(tmp_path: Path, kind: str) -> None:
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "log"
    if kind == "link":
        elsewhere.write_text("keep")
    path.symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic links"):
        open_own(path, os.O_WRONLY | os.O_TRUNC)
    with pytest.raises(OSError, match="symbolic links"), system.locked(path):
        pass
    assert elsewhere.exists() == (kind == "link")
    if kind == "link":
        assert elsewhere.read_text() == "keep"


def test_a_folder_to_be_is_tried_where_it_would_lie(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("keep")
    check_writable(tmp_path / "not" / "there" / "yet")
    check_writable(Path("."))
    for bad in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        with pytest.raises(WorkloadError, match=r"nothing can be written.*choose another place with -o"):
            check_writable(bad)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
