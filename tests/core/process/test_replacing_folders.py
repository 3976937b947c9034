"""Two writers and a reader of one folder: no result is lost, and a whole folder is never called damaged."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from torchwright.core.errors import ArtifactError
from torchwright.core.process import folders
from torchwright.core.process.replacing_folders import steady, writing

PARTS = ("first", "second", "third")


def fill(folder: Path, text: str) -> None:
    for name in PARTS:
        (folder / name).write_text(text)


def read(folder: Path) -> str:
    """Return what all parts say; raise `ArtifactError` where they differ or one is missing."""
    try:
        found = [(folder / name).read_text() for name in PARTS]
    except OSError as error:
        raise ArtifactError(str(error)) from error
    if len(set(found)) != 1:
        raise ArtifactError(f"damaged: {found}")
    return found[0]


def not_ours(folder: Path) -> str | None:
    try:
        read(folder)
    except ArtifactError as error:
        return error.summary
    return "more files" if len(os.listdir(folder)) > len(PARTS) else None


def write(out: Path, text: str, **options: float) -> None:
    with writing(out, not_ours, **options) as folder:
        fill(folder, text)


def write_slowly(out: Path, meanwhile: Callable[[], object]) -> None:
    with writing(out, not_ours) as folder:
        fill(folder, "new")
        meanwhile()


def test_a_reader_meets_one_whole_folder_or_another(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, "0")
    done = threading.Event()

    def replace() -> None:
        for number in range(60):
            write(out, str(number))
        done.set()

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        while not done.is_set():
            assert steady(out, lambda: read(out)).isdecimal()
    finally:
        thread.join()
    assert os.listdir(tmp_path) == ["out"]


def test_what_stays_damaged_is_told_at_once(tmp_path: Path) -> None:
    fill(tmp_path, "0")
    (tmp_path / "second").write_text("1")
    calls = []
    with pytest.raises(ArtifactError, match="damaged"):
        steady(tmp_path, lambda: calls.append(1) or read(tmp_path))  # type: ignore[func-returns-value]
    assert len(calls) == 1


@pytest.mark.parametrize("before", [True, False], ids=["over an older one", "in a new place"])
def test_of_two_writers_both_results_are_kept(tmp_path: Path, before: bool) -> None:
    out = tmp_path / "out"
    if before:
        write(out, "old")
    with pytest.raises(ArtifactError, match=r"another process wrote to it.*saved as .*out-2"):
        write_slowly(out, lambda: write(out, "quick"))
    assert (read(out), read(tmp_path / "out-2")) == ("quick", "new")
    assert sorted(os.listdir(tmp_path)) == ["out", "out-2"]


SLOW = """
import sys
from pathlib import Path
from test_replacing_folders import write_slowly
write_slowly(Path(sys.argv[1]), lambda: print("writing", flush=True) or sys.stdin.readline())
"""


def test_two_processes_that_write_one_folder_both_keep_their_result(tmp_path: Path) -> None:
    """Two searches with the same `-o` write like this: the first to finish keeps the folder."""
    out = tmp_path / "out"
    other = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(out)],
        cwd=Path(__file__).parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "writing\n"
        write(out, "quick")
        _, said = other.communicate("go on\n", timeout=60)
    finally:
        other.kill()
        other.wait()
    assert (other.returncode, f"saved as {out}-2" in said) == (1, True), said
    assert (read(out), read(tmp_path / "out-2")) == ("quick", "new")
    assert sorted(os.listdir(tmp_path)) == ["out", "out-2"]


def test_what_a_user_puts_there_meanwhile_is_left(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, "old")
    (tmp_path / "out-2").write_text("taken")
    with pytest.raises(ArtifactError, match=r"more files.*saved as .*out-3"):
        write_slowly(out, lambda: (out / "notes").write_text("mine"))
    assert (out / "notes").read_text() == "mine"
    assert (read(out), read(tmp_path / "out-3")) == ("old", "new")


def test_a_link_in_the_place_of_a_folder_above_is_told_and_changes_nothing(tmp_path: Path) -> None:
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    shared.mkdir()
    elsewhere.mkdir()
    private = tmp_path / "private"
    private.mkdir(mode=0o700)

    def exchange() -> None:
        [temporary] = shared.iterdir()
        shared.rename(tmp_path / "moved")
        shared.symlink_to(elsewhere)
        (elsewhere / temporary.name).symlink_to(private)

    with pytest.raises(ArtifactError, match="is not the folder that was made there"):
        write_slowly(shared / "out", exchange)
    assert private.stat().st_mode & 0o777 == 0o700
    assert os.listdir(private) == []
    assert not (elsewhere / "out").exists()
    [left] = (tmp_path / "moved").iterdir()  # for the next writer to sweep
    assert left.name.startswith(".out.unfinished-")


@pytest.mark.timeout(60)
def test_a_writer_in_its_own_scratch_folder_does_not_wait_for_itself(tmp_path: Path) -> None:
    scratch = folders.make(tmp_path, "scratch-")  # which holds its lock
    try:
        write(scratch.path / "out", "old", turn_seconds=3600.0)
        write(scratch.path / "out", "new", turn_seconds=3600.0)
        assert read(scratch.path / "out") == "new"
    finally:
        scratch.remove()


def test_a_writer_that_comes_between_the_two_renames_keeps_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write(out, "old")
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        real(source, target)
        if source == out:
            monkeypatch.undo()
            out.mkdir()
            fill(out, "quick")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(ArtifactError, match=r"another process wrote to it.*saved as .*out-2"):
        write(out, "new")
    assert (read(out), read(tmp_path / "out-2")) == ("quick", "new")
    assert sorted(os.listdir(tmp_path)) == ["out", "out-2"]
