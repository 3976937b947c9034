"""The cache folder, folders that no other user can write to, and digests of files."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from torchwright.core.errors import TorchwrightError
from torchwright.core.system import caches_home

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class UnsafeFolder(TorchwrightError):
    """A folder of compiled code that another user of the machine can write to."""


def cache_folder() -> Path:
    """Return this user's cache folder: `$TORCHWRIGHT_CACHE`, else the system's place for caches. Nothing is created."""
    chosen = os.environ.get("TORCHWRIGHT_CACHE")
    if chosen:
        return Path(chosen)
    return caches_home() / "torchwright"


def private_cache(name: str) -> Path:
    """Return the folder `name` of the cache, created and checked as `private_folder` does."""
    return private_folder(cache_folder() / name)


def private_folder(path: Path) -> Path:
    """Return `path`, a folder that only this user can write to; create missing folders with mode 700.

    Everything that is loaded as code is read from such a folder. Raises `UnsafeFolder` for one that another user owns,
    can write to, or can replace, and `OSError` where it cannot be created.
    """
    path = path.absolute()
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    if not hasattr(os, "getuid"):  # Windows: folders of a user's profile belong to that user
        return path
    path = path.resolve()
    if fault := _writable_by_others(path):
        raise UnsafeFolder(
            f"{path} is not used: code is loaded from there",
            found=fault,
            allowed="a folder of your own that nobody else can write to (mode 700)",
            next="remove it, or name another by `export TORCHWRIGHT_CACHE=FOLDER`",
        )
    return path


def _writable_by_others(path: Path) -> str | None:
    """Return why another user could put files into `path`, or replace the folder itself; None if no one can.

    Root may: an image may hold what root compiled for everybody.
    """
    status, me = path.stat(), os.getuid()
    if status.st_uid not in (0, me):
        return f"it belongs to another user (id {status.st_uid}; you are {me})"
    if status.st_mode & WRITABLE_BY_OTHERS and not _own_group(status):
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return next(_replaceable(path, me), None)


def _replaceable(path: Path, me: int) -> Iterator[str]:
    """Yield each folder above `path` in which another user could rename `path` away.

    Owners of these folders do not matter to root: containers run as root in a home of another user, and files of that
    user never pass for root's.
    """
    trusted = {0, me, _unmapped()}
    for parent in path.parents:
        status = parent.stat()
        if me != 0 and status.st_uid not in trusted:
            yield f"{parent} belongs to another user (id {status.st_uid})"
        elif status.st_mode & WRITABLE_BY_OTHERS and not (
            status.st_mode & stat.S_ISVTX or _own_group(status)
        ):
            yield f"others may write to {parent} (mode {stat.S_IMODE(status.st_mode):o})"


def _own_group(status: os.stat_result) -> bool:
    """Check whether only the group may write, and it is the user's private group: the usual umask of such systems."""
    import grp
    import pwd

    if status.st_mode & stat.S_IWOTH:
        return False
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return (
        group.gr_gid == user.pw_gid
        and group.gr_name == user.pw_name
        and not set(group.gr_mem) - {user.pw_name}
    )


def _unmapped() -> int:
    """Return the id under which a container without privileges sees the system's own folders."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
