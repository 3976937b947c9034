"""Folders of compiled code: nobody but this user (and root) can put anything there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from torchwright.core.paths import UnsafeFolder, private_cache, private_folder

NEIGHBOUR = 54321
root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can make folders of another user")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_missing_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert (mode(folder), mode(folder.parent)) == (0o700, 0o700)


def test_the_cache_is_where_its_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "cache"))
    assert private_cache("kernels") == tmp_path / "cache" / "kernels"
    assert mode(tmp_path / "cache" / "kernels") == 0o700


@pytest.mark.parametrize("wrong", [0o777, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, wrong: int) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(wrong)
    with pytest.raises(UnsafeFolder, match=rf"others may write to it \(mode {wrong:o}\).*TORCHWRIGHT_CACHE"):
        private_folder(tmp_path / "cache")


def test_a_folder_that_others_can_rename_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UnsafeFolder, match=r"others may write to .*open"):
        private_folder(tmp_path / "open" / "cache")
    (tmp_path / "open").chmod(0o1777)  # as /tmp: only its owner renames a folder there
    private_folder(tmp_path / "open" / "cache")


def test_a_folder_that_others_can_read_is_used(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    assert private_folder(tmp_path / "cache") == tmp_path / "cache"


@root_only
def test_a_neighbours_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", NEIGHBOUR, NEIGHBOUR)
    with pytest.raises(UnsafeFolder, match=f"belongs to another user .id {NEIGHBOUR}"):
        private_folder(tmp_path / "cache")


@root_only
def test_a_link_to_a_neighbours_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", NEIGHBOUR, NEIGHBOUR)
    (tmp_path / "cache").symlink_to(tmp_path / "theirs")
    with pytest.raises(UnsafeFolder, match="belongs to another user"):
        private_folder(tmp_path / "cache")


@root_only
def test_a_user_refuses_what_lies_in_a_neighbours_home_and_takes_what_root_made() -> None:
    """In a child with another user id, as a user without privileges sees these folders."""
    base = Path("/tmp") / f"torchwright-test-{os.getpid()}"
    base.mkdir(mode=0o755)
    try:
        (base / "home" / "cache").mkdir(parents=True)
        os.chown(base / "home", NEIGHBOUR, NEIGHBOUR)
        os.chown(base / "home" / "cache", NEIGHBOUR + 1, NEIGHBOUR + 1)
        (base / "image").mkdir(mode=0o755)
        assert as_user(NEIGHBOUR + 1, base / "home" / "cache") == "refused"
        assert as_user(NEIGHBOUR + 1, base / "image") == "taken"
    finally:
        for folder in (base / "image", base / "home" / "cache", base / "home", base):
            folder.rmdir()


def as_user(user: int, path: Path) -> str:
    """What `private_folder` makes of `path` for another user: "taken" or "refused"."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        said = "fault"
        try:
            os.setgid(user)
            os.setuid(user)
            private_folder(path)
            said = "taken"
        except UnsafeFolder:
            said = "refused"
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as answer:
        return answer.read()
