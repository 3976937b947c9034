"""Settings of the process's allocator for large blocks."""

from __future__ import annotations

import ctypes
import ctypes.util
import glob
import sys
from pathlib import Path

from torchwright.core.errors import TorchwrightError

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
"""Parameters of glibc's mallopt(3)."""
NEVER_TRIM = -1
TOP_PAD_BYTES = 64 << 20
LARGE_BYTES = 1 << 20
PACKAGES = {"jemalloc": "libjemalloc2", "mimalloc": "libmimalloc2.0", "tcmalloc": "libtcmalloc-minimal4"}
"""Debian and Ubuntu packages that bring each allocator."""
LIBRARIES = {
    "jemalloc": ("jemalloc",),
    "mimalloc": ("mimalloc",),
    "tcmalloc": ("tcmalloc_minimal", "tcmalloc"),
}
HUGE_PAGES = "huge_pages"
HUGE_PAGES_VARIABLE = "THP_MEM_ALLOC_ENABLE"
"""PyTorch reads it once, at its first tensor of 2 MB."""
FROM_THE_START = (*LIBRARIES, HUGE_PAGES)
"""Kinds that a process has from its start or never."""
KERNEL_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/lib/*-linux-gnu", "/opt/homebrew/lib")


def apply_allocator(kind: str | None) -> None:
    """Make this process's malloc keep freed memory, if `kind` is `retain`; the other kinds must be in place already.

    glibc maps blocks of 32 MB and more anew each time, and returns the top of the heap when it is free: either way
    the kernel clears the pages of the next activation again, 4 KB by 4 KB. The setting cannot be undone in this
    process.

    Raises `TorchwrightError` if the C library does not take the settings, and for another allocator with which the
    process was not started.
    """
    if kind is None:
        return
    if kind in FROM_THE_START:
        if not is_there(kind):
            raise TorchwrightError(f"this process was started without {kind}", next=started_with(kind))
        return
    fault = retain_fault()
    libc = ctypes.CDLL(None)
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER_TRIM), (M_TOP_PAD, TOP_PAD_BYTES))
    if fault or not all(libc.mallopt(parameter, value) for parameter, value in settings):
        raise TorchwrightError(
            "the allocator cannot be told to keep memory", found=fault or "mallopt refused the settings"
        )


def retain_where_possible() -> None:
    """`apply_allocator("retain")`, or nothing where the C library cannot."""
    if retain_fault() is None:
        apply_allocator("retain")


def return_large_blocks() -> None:
    """Have blocks of a megabyte and more go back to the system when they are freed, where the C library is glibc.

    By itself it raises its threshold to 32 MB with what it sees, and keeps the holes between smaller blocks.
    """
    if retain_fault() is None:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def retain_fault() -> str | None:
    """Why `retain` cannot work here, or None."""
    if not sys.platform.startswith("linux"):
        return f"mallopt belongs to glibc; this is {sys.platform}"
    if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return "mallopt's thresholds belong to glibc; this system has another C library"
    return None


def huge_pages_fault(setting: Path = KERNEL_SETTING) -> str | None:
    """Return a reason against asking for huge pages, or None; `setting` is the kernel's file."""
    if not sys.platform.startswith("linux"):
        return f"transparent huge pages are Linux's; this is {sys.platform}"
    try:
        said = setting.read_text(encoding="utf-8")
    except OSError as error:
        return f"this kernel has no transparent huge pages ({setting}: {error.strerror})"
    if "[never]" in said:
        return f"the kernel gives none: {setting} says never; as root: echo madvise > {setting}"
    if "[always]" in said:
        return f"the kernel gives huge pages unasked: {setting} says always"
    return None


def started_with(kind: str) -> str:
    """Return the command that starts a process with one of `FROM_THE_START`."""
    return " ".join(f"{name}={value}" for name, value in environment_for(kind).items()) + " python …"


def environment_for(kind: str) -> dict[str, str]:
    """Return the environment that must be set before a process starts, for one of `FROM_THE_START`."""
    if kind == HUGE_PAGES:
        return {HUGE_PAGES_VARIABLE: "1"}
    return {"LD_PRELOAD": find_allocator(kind) or f"lib{kind}.so"}


def is_there(kind: str) -> bool:
    """Check whether this process was started with one of `FROM_THE_START`."""
    if not sys.platform.startswith("linux"):
        return False
    if kind == HUGE_PAGES:  # as it was at the start: what Python has set since may have come too late
        return f"{HUGE_PAGES_VARIABLE}=1".encode() in Path("/proc/self/environ").read_bytes().split(b"\0")
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    return any(f"/lib{name}.so" in mapped for name in LIBRARIES[kind])


def find_allocator(kind: str) -> str | None:
    """The path of the library that replaces malloc, or None where it is not installed."""
    for name in LIBRARIES[kind]:
        for folder in FOLDERS:
            found = sorted(glob.glob(f"{folder}/lib{name}.so*"))
            if found:
                return str(Path(found[0]))
        found_name = ctypes.util.find_library(name)
        if found_name:
            return found_name
    return None
