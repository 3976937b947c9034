"""Temporary folders of the living and the dead."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from factories import make_recipe
from torchwright.core.process import folders
from torchwright.optimization.artifact import folder as artifact

HOLD = """
import pathlib, sys, time
from torchwright.optimization.artifact import folder as artifact
from torchwright.core.process import folders
where, how = pathlib.Path(sys.argv[1]), sys.argv[2]
if how == "make":
    folders.make(where, "x-")
elif how == "replace":  # what `writing` does in its last moments
    (where / "out").rename(folders.make(where, ".out.replaced-").path / "out")
else:
    writing = artifact.writing(where / "out")
    writing.__enter__()
print("held", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def holder() -> Iterator[Callable[[Path, str], subprocess.Popen[str]]]:
    """Starts processes that hold a folder until they are killed."""
    started: list[subprocess.Popen[str]] = []

    def start(where: Path, how: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", HOLD, str(where), how]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def whole(folder: Path) -> None:
    """Make a folder an artifact."""
    artifact.finish(folder, make_recipe(), {"engine": "eager", "dtype": "float32"})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_swept_when_its_process_is_dead_and_not_before(
    tmp_path: Path, holder: Callable[[Path, str], subprocess.Popen[str]]
):
    mine = folders.make(tmp_path, "x-")
    living, dying = holder(tmp_path, "make"), holder(tmp_path, "make")
    held = names(tmp_path)
    assert len(held) == 3
    folders.sweep(tmp_path, "x-")
    assert names(tmp_path) == held
    kill(dying)
    folders.sweep(tmp_path, "x-")
    assert len(names(tmp_path)) == 2
    assert mine.path.is_dir()
    kill(living)
    folders.sweep(tmp_path, "x-")
    assert names(tmp_path) == [mine.path.name]
    mine.remove()
    assert names(tmp_path) == []


def test_only_folders_of_the_very_kind_are_swept(tmp_path: Path):
    """A lock is no proof by itself: nobody holds a folder of the user's own either."""
    precious = tmp_path / "elsewhere"
    precious.mkdir()
    for name in ("x-notes", "x-2024-01-01", "xyabcdefgh", "x-ABCDEFGH"):
        (tmp_path / name).mkdir()
    (tmp_path / "x-afile123").write_text("a file")
    (tmp_path / "x-alink123").symlink_to(precious)
    before = names(tmp_path)
    folders.sweep(tmp_path, "x-")
    assert names(tmp_path) == before


def test_the_prefix_is_no_pattern(tmp_path: Path):
    (tmp_path / ".a.unfinished-abcdefgh").mkdir()
    folders.sweep(tmp_path, ".[ab].unfinished-")
    assert names(tmp_path) == [".a.unfinished-abcdefgh"]


def test_a_sweep_between_making_and_locking_only_costs_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The only moment in which a living process's folder looks like a dead one's."""
    real, swept = os.open, []

    def sweep_first(path: Path, *args: int) -> int:
        swept.append(path)
        descriptor = -1
        if len(swept) == 2:  # between opening and locking; the first time before it is opened
            descriptor = real(path, *args)
        if len(swept) <= 2:
            path.rmdir()
        return descriptor if descriptor >= 0 else real(path, *args)

    monkeypatch.setattr(folders.os, "open", sweep_first)
    folder = folders.make(tmp_path, "x-")
    monkeypatch.undo()
    assert names(tmp_path) == [folder.path.name]
    assert len(swept) == 3
    folders.sweep(tmp_path, "x-")
    assert folder.path.is_dir()
    folder.remove()


def test_a_later_run_removes_what_a_killed_one_left_beside_its_output(
    tmp_path: Path, holder: Callable[[Path, str], subprocess.Popen[str]]
):
    living, dying = holder(tmp_path, "write"), holder(tmp_path, "write")
    kill(dying)
    assert len(names(tmp_path)) == 2
    with artifact.writing(tmp_path / "out") as folder:
        assert len(names(tmp_path)) == 2  # its own, and the living one's
        whole(folder)
    assert len(names(tmp_path)) == 2
    kill(living)
    with artifact.writing(tmp_path / "out") as folder:
        whole(folder)
    assert names(tmp_path) == ["out"]


def test_a_folder_of_the_users_own_is_not_swept_for_its_name(tmp_path: Path):
    """Only one that is empty or that bears the mark of `writing` is."""
    for name in (".out.unfinished-abcdefgh", ".out.replaced-abcdefgh"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("years of work")
    (tmp_path / ".out.unfinished-12345678").mkdir()
    with artifact.writing(tmp_path / "out") as folder:
        whole(folder)
    assert names(tmp_path) == [".out.replaced-abcdefgh", ".out.unfinished-abcdefgh", "out"]
    for name in names(tmp_path)[:2]:
        assert (tmp_path / name / "thesis.tex").read_text() == "years of work"


def test_an_artifact_that_a_killed_run_had_moved_aside_is_put_back(
    tmp_path: Path, holder: Callable[[Path, str], subprocess.Popen[str]]
):
    (tmp_path / "out").mkdir()
    whole(tmp_path / "out")
    old = (tmp_path / "out" / "recipe.json").read_text()
    kill(holder(tmp_path, "replace"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ZeroDivisionError), artifact.writing(tmp_path / "out"):
        raise ZeroDivisionError
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "recipe.json").read_text() == old


def test_what_takes_the_place_of_a_dead_folder_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In a folder that others may write to, another folder of the user's may be renamed at any moment."""
    left, real = tmp_path / "x-abcdefgh", os.listdir
    (left / "deep").mkdir(parents=True)
    (left / "deep" / "scratch").write_text("")
    (left / "link").symlink_to(tmp_path / "thesis")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")

    def exchange(folder: int) -> list[str]:
        left.rename(tmp_path / "moved")
        (tmp_path / "thesis").rename(left)
        return real(folder)

    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "listdir", exchange)
        folders.sweep(tmp_path, "x-")
    assert (left / "thesis.tex").read_text() == "years of work"
    assert list((tmp_path / "moved").iterdir()) == []


def test_a_folder_that_became_a_result_is_not_removed(tmp_path: Path):
    folder = folders.make(tmp_path, "x-")
    (folder.path / "file").write_text("keep")
    folder.path.rename(tmp_path / "result")
    folder.remove()
    assert (tmp_path / "result" / "file").read_text() == "keep"


def test_scratch_in_the_systems_own_place_is_swept_too(
    tmp_path: Path, holder: Callable[[Path, str], subprocess.Popen[str]]
):
    (tmp_path / f"{folders.PREFIX}abcdefgh" / "deep").mkdir(parents=True)
    with folders.temporary(tmp_path) as first, folders.temporary(tmp_path) as second:
        assert names(tmp_path) == sorted([first.name, second.name])
    assert names(tmp_path) == []


def test_without_locks_folders_are_made_and_none_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on Windows: another process's folder cannot be told from one of the dead."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    first = folders.make(tmp_path, "x-")
    folders.sweep(tmp_path, "x-")
    assert first.path.is_dir()
    first.remove()
    assert not first.path.exists()


# Sockets: their paths have a length of about a hundred bytes.


def test_a_folder_for_sockets_passes_over_a_long_path(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    folder = folders.make_for_sockets("engine-12345678", long)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(folder.path / "engine-12345678"))
        assert folder.path.stat().st_mode & 0o777 == 0o700
    finally:
        folder.remove()
    assert list(long.iterdir()) == []


def test_a_folder_for_sockets_is_beside_other_temporary_files_where_that_fits() -> None:
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        folder = folders.make_for_sockets("engine-12345678", short)
        assert folder.path.parent == short
        folder.remove()
    finally:
        short.rmdir()


def test_no_short_folder_is_an_error_that_names_the_cure(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long a path for a Unix socket: set TMPDIR"):
        folders.make_for_sockets("x" * 120, tmp_path / ("x" * 90))
