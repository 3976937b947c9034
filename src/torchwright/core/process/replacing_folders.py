"""Folders that take each other's place whole: readers see one or the other, and writers lose no result.

A writer fills a temporary folder next to the destination, and moves it there at the end. The first writer keeps the
destination; the other's result is saved under its own name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Self, TypeVar

from torchwright.core import system
from torchwright.core.errors import ArtifactError
from torchwright.core.process import folders, interrupts
from torchwright.core.process.files import check_writable

T = TypeVar("T")
NotOurs = Callable[[Path], str | None]
"""Return the reason why a folder may not be replaced, or None."""
MARK = ".unfinished"
TURN_SECONDS = 10.0
"""Seconds that a writer waits for another that is just taking its place."""
TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""Errors of a rename to a name that is taken."""
TRIES, PAUSE_SECONDS = 20, 0.02
"""Retries of a reader whose folder is replaced again and again."""


class Seen:
    """A folder as it lies somewhere now, kept open so that no other folder gets its number meanwhile."""

    def __init__(self, path: Path) -> None:
        self._file, self._number = -1, _number(path)
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
            self._number = _number(self._file)

    def is_at(self, path: Path) -> bool:
        """Check whether the same folder still lies there, or still none."""
        return _number(path) == self._number

    @contextlib.contextmanager
    def turn(self, seconds: float) -> Generator[None, None, None]:
        """Hold the folder's lock while it is replaced; go on without one that is not released within `seconds`.

        The folder above is not locked: a scratch folder is, by the process that writes into it.
        """
        if self._file >= 0 and system.folders_lock():
            until = time.monotonic() + seconds
            while system.try_lock(self._file) is False and time.monotonic() < until:
                time.sleep(PAUSE_SECONDS)
        yield

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file >= 0:
            os.close(self._file)


def _number(place: Path | int) -> tuple[int, int] | None:
    try:
        found = os.stat(place)
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def writing(
    path: Path, not_ours: NotOurs, *, turn_seconds: float = TURN_SECONDS
) -> Generator[Path, None, None]:
    """Yield a temporary folder next to `path` that replaces it when the block ends well, and is deleted otherwise.

    A folder of the kind that `not_ours` knows is replaced; anything else is left alone. Leftovers of killed processes
    next to `path` are removed, and a folder that one of them had moved aside is restored. A writer that is just taking
    the place is waited for, `turn_seconds` at most.

    Raises `ArtifactError` when `path` exists and is not of that kind, and `WorkloadError` where nothing can be written.
    If another process wrote to `path` meanwhile, the result is saved next to it, and the `ArtifactError` names it.
    """
    path = path.absolute()
    _refuse_to_replace(path, not_ours)
    check_writable(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = f".{path.name}.unfinished-"
    for left, folder in folders.dead(path.parent, unfinished):
        if (left / MARK).is_file() or not any(left.iterdir()):
            folders.remove(left, folder)
    put_back(path, not_ours)
    temporary = folders.make(path.parent, unfinished)
    try:
        with Seen(path) as seen:
            (temporary.path / MARK).touch()
            yield temporary.path
            interrupts.check()
            _check_still_there(temporary)
            (temporary.path / MARK).unlink()
            _open_to_readers(temporary)
            with seen.turn(turn_seconds):
                _take_place(temporary.path, path, seen, not_ours)
    finally:
        temporary.remove()


def _check_still_there(temporary: folders.Folder) -> None:
    """Raise `ArtifactError` where the folder's path leads to another one now, through a link that was put there."""
    if temporary.lock >= 0 and _number(temporary.path) != _number(temporary.lock):
        raise ArtifactError(
            f"{temporary.path} is not the folder that was made there",
            found="somebody renamed it or a folder above it, or put a link in its place",
            next="choose a place with -o in which only you can write",
        )


def _open_to_readers(temporary: folders.Folder) -> None:
    if temporary.lock >= 0:
        os.fchmod(temporary.lock, 0o755)
    else:
        temporary.path.chmod(0o755)


def put_back(path: Path, not_ours: NotOurs) -> None:
    """Bring back the folder that a dead process had moved aside; what is anything else stays where it is."""
    path = path.absolute()
    for left, folder in folders.dead(path.parent, _aside(path)):
        entries = list(left.iterdir())
        if entries and (entries != [left / path.name] or not_ours(left / path.name)):
            continue
        if entries and not path.exists():
            os.replace(left / path.name, path)
        folders.remove(left, folder)


def steady(path: Path, read: Callable[[], T]) -> T:
    """Return what `read` reads of a folder; read it again where an `ArtifactError` came of its replacement."""
    for _ in range(TRIES):
        with Seen(path) as seen:
            try:
                return read()
            except ArtifactError:
                if seen.is_at(path) and not any(path.parent.glob(_aside(path) + "*")):
                    raise
        time.sleep(PAUSE_SECONDS)
    return read()


def _refuse_to_replace(path: Path, not_ours: NotOurs) -> None:
    if _is_free(path):
        return
    if fault := steady(path, lambda: not_ours(path)):
        raise ArtifactError(
            f"{path} exists and is not an artifact",
            found=fault,
            next="choose another folder with -o, or remove it yourself",
        )


def _is_free(path: Path) -> bool:
    return not os.path.lexists(path) or (path.is_dir() and not path.is_symlink() and not any(path.iterdir()))


def _take_place(made: Path, path: Path, seen: Seen, not_ours: NotOurs) -> None:
    """Move a finished folder to `path`; if another process was faster, save it next to `path` and raise."""
    if _is_free(path):
        with contextlib.suppress(OSError):  # another process was faster
            os.replace(made, path)
            return
    fault = "another process wrote to it" if not seen.is_at(path) else not_ours(path)
    if fault is None:
        old = folders.make(path.parent, _aside(path), scratch=False)
        os.replace(path, old.path / path.name)
        try:
            os.replace(made, path)
        except OSError as error:  # a writer that saw no folder there came between the two
            if error.errno not in TAKEN:
                raise
            fault = "another process wrote to it"
        old.remove()
    if fault is not None:
        raise ArtifactError(
            f"{path} has changed since this began, and is left as it is",
            found=fault,
            next=f"the result is whole, and saved as {_save_beside(made, path)}",
        )


def _save_beside(made: Path, path: Path) -> Path:
    """Move a folder to the first free name after `path`; return it."""
    number = 2
    while True:
        beside = path.with_name(f"{path.name}-{number}")
        if _is_free(beside):
            try:
                os.replace(made, beside)
                return beside
            except OSError as error:
                if error.errno not in TAKEN:
                    raise
        number += 1


def _aside(path: Path) -> str:
    """Return the name of the folder that holds the old one while another takes its place."""
    return f".{path.name}.replaced-"
