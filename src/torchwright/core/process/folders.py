"""Temporary folders: each is locked by the process that made it, so that a later run can tell those of the dead.

A process that is killed outright (`kill -9`, no memory, no power) removes nothing. Its lock goes with it, and whoever
makes a folder of the same kind next removes what it left.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from torchwright.core import system
from torchwright.core.process import ending
from torchwright.core.system import try_lock

RANDOM = 8
"""Characters that `tempfile.mkdtemp` ends names with."""
SUFFIX = "[0-9a-z_]" * RANDOM
SHORT = ("/tmp", "/dev/shm")
"""Folders for sockets if the path of TMPDIR is too long for them."""
PREFIX = "torchwright.scratch-"
"""Prefix of folders in the system's temporary folder."""


@dataclass
class Folder:
    """A folder that is this process's until it is removed or the process ends."""

    path: Path
    lock: int

    def remove(self) -> None:
        """Delete the folder and release its lock."""
        remove(self.path, self.lock)
        self.release()

    def release(self) -> None:
        """Let go of a folder that has become something else."""
        ending.let_go(self.path)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def make(parent: Path, prefix: str, *, scratch: bool = True) -> Folder:
    """Make a new folder `prefix`… in `parent`, locked.

    A `scratch` folder is removed when a signal ends the process; one that holds somebody's files is not.
    """
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        if scratch:
            ending.hold(path)
        if not system.folders_lock():
            return Folder(path, -1)
        lock = -1
        try:
            lock = os.open(path, os.O_RDONLY)
            held = try_lock(lock)
            if held is None or (held and path.is_dir()):  # a file system without locks is never swept
                return Folder(path, lock)
        except FileNotFoundError:
            pass  # between the two lines another process took it for a dead one's: make another
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        if lock >= 0:
            os.close(lock)


def remove(path: Path, folder: int) -> None:
    """Delete an open folder if it lies at `path`, and no other that somebody puts there meanwhile.

    `folder` is its file descriptor; -1 where the system has none for folders.
    """
    if folder < 0 or not shutil.rmtree.avoids_symlink_attacks:
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        if not os.path.samestat(os.lstat(path), os.fstat(folder)):  # it became a result, or was moved away
            return
        for name in os.listdir(folder):
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
            with contextlib.suppress(OSError):  # a folder, which is gone
                os.unlink(name, dir_fd=folder)
        path.rmdir()  # another folder stays if anything lies in it


def sweep(parent: Path, prefix: str) -> None:
    """Remove what processes that are dead left in `parent`."""
    for path, folder in dead(parent, prefix):
        remove(path, folder)


def dead(parent: Path, prefix: str) -> Iterator[tuple[Path, int]]:
    """Yield this user's folders `prefix`… in `parent` that no living process holds, with their file descriptors.

    Each is held while it is looked at.
    """
    if not system.folders_lock():
        return
    for name in glob.glob(glob.escape(prefix) + SUFFIX, root_dir=parent, include_hidden=True):
        path = parent / name
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # no folder, not ours to read, or gone meanwhile
            continue
        try:
            if system.is_mine(lock) and try_lock(lock):
                yield path, lock
        finally:
            os.close(lock)


@contextlib.contextmanager
def temporary(parent: Path | None = None) -> Generator[Path, None, None]:
    """A folder in `parent` or the system's own place for temporary files, removed with the block."""
    folder = make_temporary(parent)
    try:
        yield folder.path
    finally:
        folder.remove()


def make_temporary(parent: Path | None = None) -> Folder:
    """A folder in `parent` or the system's own place for temporary files; what the dead left there is removed."""
    parent = parent or Path(tempfile.gettempdir())
    sweep(parent, PREFIX)
    return make(parent, PREFIX)


def make_for_sockets(longest_name: str, parent: Path | None = None) -> Folder:
    """Return a private folder in which a Unix socket called `longest_name` can be bound.

    It is in `parent`, by default the place for temporary files, or elsewhere if that has a long path.
    Raises `OSError` where no folder for temporary files is short enough and can be written to.
    """
    fault = OSError("no folder for temporary files")
    first = str(parent or tempfile.gettempdir())
    for place in dict.fromkeys(filter(None, (first, os.environ.get("XDG_RUNTIME_DIR"), *SHORT))):
        path = f"{place}/{PREFIX}{'x' * RANDOM}/{longest_name}"
        if len(os.fsencode(path)) > system.longest_socket_path():
            fault = OSError(f"{place} is too long a path for a Unix socket: set TMPDIR to a shorter one")
            continue
        try:
            sweep(Path(place), PREFIX)
            return make(Path(place), PREFIX)
        except OSError as error:
            fault = error
    raise fault
