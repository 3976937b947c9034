"""Files that another process reads whole or not at all."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from torchwright.errors import WorkloadError
from torchwright.process import ending


@contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """A name beside `path`: the file that the block writes there takes its place, unless the block fails."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with ending.unfinished(beside):
        try:
            yield beside
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


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
