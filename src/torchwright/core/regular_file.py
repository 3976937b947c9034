"""Open and read regular files only: a FIFO blocks its reader for ever, and a device may have no end."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class NotRegular(OSError):
    """A path that leads to something other than a regular file."""


def is_url(text: str) -> bool:
    """Return whether a text is a URL, such as https://host/name, and not the name of a file."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text) is not None


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, without waiting.

    Raises `OSError` for a path that cannot be opened, `NotRegular` for a FIFO, a device, a socket or a folder.
    """
    try:
        # Without O_NONBLOCK the open call itself waits for somebody to write into a FIFO.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except ValueError as error:  # a name that holds a null byte
        raise OSError(f"{error}: {str(path)[:200]!r}") from error
    try:
        check_regular(os.fstat(file).st_mode)
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def check_regular(mode: int) -> None:
    """Raise `NotRegular`, naming the kind, for the mode of anything but a regular file."""
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in KINDS if test(mode)), "not a file")
        raise NotRegular(f"it is {kind}, and a regular file is read")


def read_regular(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file.

    Raises `OSError` as `open_regular` does, and `ValueError` for a file of more than `most` bytes.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"more than {most:,} bytes")
    return data
