"""Files that another process reads whole or not at all."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from torchwright.core.errors import WorkloadError
from torchwright.core.process import ending


@contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """Yield a new, empty file next to `path`, which replaces `path` unless the block fails."""
    beside = _new_beside(path)
    with ending.unfinished(beside):
        try:
            yield beside
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def _new_beside(path: Path) -> Path:
    """Create a file that was not there, so that no link that somebody else has put there is followed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    return beside


def open_own(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file of this user's for writing, made if need be; raises `OSError` where a link lies in its place."""
    return os.open(path, flags | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), mode)


def check_writable(folder: Path) -> None:
    """Raises `WorkloadError` where no file can be made in a folder, or in the nearest one above it that is there.

    It makes one and removes it: permissions alone do not tell of read-only disks and folders that are the system's.
    """
    there = folder
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise WorkloadError(
            f"nothing can be written to {folder}",
            found=f"{there}: {error.strerror}",
            next="choose another place with -o",
        ) from error
