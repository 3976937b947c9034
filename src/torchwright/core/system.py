# pyright: basic
"""Differences between Linux, macOS and Windows: locks, processes, signals, compilers, library names.

Only Linux was run. The others are simulated in `tests/core/test_system.py`, which says what they would be asked.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import socket
    from multiprocessing.connection import Connection

KILLED = -9
"""The exit code, as `subprocess` gives it, of a process that was killed outright."""
LOCK_SECONDS = 0.05
"""Between two tries for a lock where the system does not wait itself."""


def windows() -> bool:
    """Check whether this is Windows."""
    return os.name == "nt"


def macos() -> bool:
    """Check whether this is macOS."""
    return sys.platform == "darwin"


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """These variables are set within the block, and afterwards what they were."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# Processes


class Apart(TypedDict, total=False):
    """Arguments of `subprocess.Popen`, one for each system."""

    creationflags: int
    start_new_session: bool


class Handing(TypedDict, total=False):
    """Arguments like those of `Apart`."""

    pass_fds: list[int]
    close_fds: bool


def apart() -> Apart:
    """Arguments of `subprocess.Popen`: a process that Ctrl-C does not reach, and that `kill_all` ends with its own."""
    if windows():
        return {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0x200)}
    return {"start_new_session": True}


def handing(sockets: Sequence[socket.socket]) -> Handing:
    """Arguments of `subprocess.Popen`: a process that has these sockets, by the numbers that they have here."""
    if not windows():
        return {"pass_fds": [one.fileno() for one in sockets]}
    for one in sockets:
        one.set_inheritable(True)
    return {"close_fds": False}


def connection(end: socket.socket) -> Connection:
    """Send messages over a separate socket for the same purpose; on Windows a socket's number is not a file
    descriptor.
    """
    from multiprocessing.connection import Connection

    return Connection(end.dup().detach())


def kill_all(process: subprocess.Popen[Any] | Any) -> None:
    """End a process that was started `apart`, and what it started; nothing where it has ended."""
    if windows():
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True, check=False)
        return
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def kill_descendants() -> None:
    """On Linux, end what this process has started, and what those have started, also in sessions of their own."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
            parent = int(stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    doomed = list(children.get(os.getpid(), ()))
    for pid in doomed:  # grows while it is walked
        doomed += children.get(pid, ())
    for pid in doomed:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def forks() -> bool:
    """Check whether a process may be forked after its libraries are loaded; macOS's libraries do not survive it."""
    return sys.platform == "linux" and hasattr(os, "fork")


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals by which a program is asked to end; Windows has no SIGHUP."""
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


def only_linux(what: str) -> str | None:
    """Why `what` cannot run here, where it needs what Linux alone has; None on Linux."""
    if sys.platform == "linux":
        return None
    return f"{what} runs on Linux alone, and this is {sys.platform}: in WSL, a container or a virtual machine it does"


def peak_memory_bytes() -> int:
    """The most memory that this process ever held, where /proc does not tell."""
    if windows():
        return _windows_peak()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if macos() else 1024)


def _windows_peak() -> int:
    import ctypes

    class Counters(ctypes.Structure):
        """PROCESS_MEMORY_COUNTERS of psapi.h."""

        _fields_ = (
            ("cb", ctypes.c_uint32),
            ("PageFaultCount", ctypes.c_uint32),
            ("PeakWorkingSetSize", ctypes.c_size_t),
            *((f"more{number}", ctypes.c_size_t) for number in range(7)),
        )

    counters = Counters(cb=ctypes.sizeof(Counters))
    kernel: Any = ctypes.windll.kernel32  # type: ignore[attr-defined]
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    process = ctypes.c_void_p(kernel.GetCurrentProcess())
    if not kernel.K32GetProcessMemoryInfo(process, ctypes.byref(counters), counters.cb):
        raise OSError("Windows does not say how much memory this process holds")
    return counters.PeakWorkingSetSize


# Locks


def folders_lock() -> bool:
    """Check whether a folder can be locked: Windows cannot open one, so leftovers of dead processes are not swept
    there.
    """
    return importlib.util.find_spec("fcntl") is not None


def try_lock(descriptor: int) -> bool | None:
    """Take a lock with fcntl if it is free and return whether it is held; None if the file system has no locks."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_mine(descriptor: int) -> bool:
    """Check whether this user owns an open file; without user ids the folder's own permissions decide."""
    return not hasattr(os, "getuid") or os.fstat(descriptor).st_uid == os.getuid()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, waiting for whoever holds it; it goes with the process that holds it."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with open(os.open(path, flags, 0o666), "w", encoding="utf-8") as file:
        if importlib.util.find_spec("fcntl") is not None:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
            yield
            return
        with _locked_byte(file):
            yield


@contextlib.contextmanager
def _locked_byte(file: IO[str]) -> Iterator[None]:
    """The first byte of a file, by Windows' own locks: those give up after ten seconds, so it is tried again."""
    import msvcrt

    locking: Any = msvcrt
    while True:
        try:
            locking.locking(file.fileno(), locking.LK_NBLCK, 1)
            break
        except OSError:
            time.sleep(LOCK_SECONDS)
    try:
        yield
    finally:
        file.seek(0)
        locking.locking(file.fileno(), locking.LK_UNLCK, 1)


def longest_socket_path() -> int:
    """Return how many bytes the path of a Unix socket may have: `sockaddr_un` less the byte that ends it."""
    return 103 if macos() else 107


# Compilers and libraries


def library_suffix() -> str:
    """Return the file extension of shared libraries."""
    return ".dll" if windows() else ".dylib" if macos() else ".so"


def cxx() -> str:
    """The C++ compiler's command: what CXX says, or the system's usual one."""
    return os.environ.get("CXX") or ("cl" if windows() else "clang++" if macos() else "g++")


def cxx_remedy() -> str:
    """Return the command that installs a compiler."""
    if windows():
        return "install Visual Studio's Build Tools and LLVM, or set CXX"
    if macos():
        return "`xcode-select --install` and `brew install libomp`, or set CXX"
    return "`apt-get install g++`, or set CXX"


def is_msvc(compiler: str) -> bool:
    """Check whether a compiler takes Microsoft's options instead of GCC's."""
    name = compiler.replace("\\", "/").rpartition("/")[2].lower()
    return name.removesuffix(".exe") in ("cl", "clang-cl")


def shared_code() -> tuple[str, ...]:
    """Options of GCC's kind that code for a shared library is compiled with; on Windows all code may lie anywhere."""
    return () if windows() else ("-fPIC",)


def openmp() -> tuple[str, ...]:
    """Options of GCC's kind for OpenMP: Apple's compiler knows it behind the preprocessor alone."""
    return ("-Xpreprocessor", "-fopenmp") if macos() else ("-fopenmp",)


def openmp_library() -> tuple[str, ...]:
    """The same for the linker."""
    return ("-lomp",) if macos() else ("-fopenmp",)


def found_beside(folder: Path) -> tuple[str, ...]:
    """The linker's option by which a library finds those of `folder`; Windows asks its own search path."""
    return () if windows() else (f"-Wl,-rpath,{folder}",)


def program_command(compiler: str, source: Path, made: Path) -> list[str]:
    """Return the command that compiles a C++20 program with OpenMP from one file."""
    if is_msvc(compiler):
        return [compiler, "/nologo", "/std:c++20", "/EHsc", "/openmp", str(source), f"/Fe:{made}"]
    return [compiler, "-std=c++20", *openmp(), str(source), *openmp_library(), "-o", str(made)]


# Places


def caches_home() -> Path:
    """Return the folder where this user's programs keep files that they can rebuild."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen)
    if windows() and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local)
    return Path.home() / ("Library/Caches" if macos() else ".cache")
