"""How the process's allocator treats large blocks."""

from __future__ import annotations

import ctypes
import ctypes.util
import glob
import sys
from pathlib import Path

from torchwright.errors import TorchwrightError

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
FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/lib/*-linux-gnu", "/opt/homebrew/lib")


def apply_allocator(kind: str | None) -> None:
    """Make this process's malloc keep what is freed, where `kind` is `retain`; the others must be there already.

    glibc maps blocks of 32 MB and more afresh each time, and hands the top of the heap back when it is free: either
    way the kernel clears the pages of the next activation again, 4 KB by 4 KB. There is no way back in this process.

    Raises `TorchwrightError` where the C library does not take the settings, and for another allocator without which
    the process was started.
    """
    if kind is None:
        return
    if kind in LIBRARIES:
        if not is_preloaded(kind):
            raise TorchwrightError(
                f"this process was started without {kind}", next=f"LD_PRELOAD={find_allocator(kind)} python …"
            )
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


def is_preloaded(kind: str) -> bool:
    """Whether this process was started with the library that replaces malloc."""
    if not sys.platform.startswith("linux"):
        return False
    mapped = Path("/proc/self/maps").read_text()
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
