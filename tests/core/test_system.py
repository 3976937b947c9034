"""What other systems would be asked, simulated: nothing here ran on Windows or macOS."""

from __future__ import annotations

import ctypes
import importlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchwright.core import system
from torchwright.core.errors import WorkloadError
from torchwright.core.paths import cache_folder
from torchwright.core.process import folders, interrupts, limits
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.cpu.build import BuildError
from torchwright.hardware.measure import toolchain
from torchwright.optimization.trial.fork_server import can_fork

Become = Callable[[str], None]
CLANG_CL = next(
    filter(None, map(shutil.which, ("clang-cl", "clang-cl-19", "clang-cl-16", "clang-cl-14"))), None
)


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Become:
    """Have this package take the system for another, without what that one lacks."""

    def become(name: str) -> None:
        monkeypatch.setattr(sys, "platform", name)
        monkeypatch.delenv("CXX", raising=False)
        if name != "win32":
            return
        monkeypatch.setattr(system, "windows", lambda: True)  # os.name itself would break pathlib
        for module in ("fcntl", "resource"):
            monkeypatch.setitem(sys.modules, module, None)
        for lacking in ("fork", "getuid", "killpg", "setsid", "O_NOFOLLOW", "O_DIRECTORY"):
            monkeypatch.delattr(os, lacking)
        for lacking in ("SIGHUP", "SIGALRM", "SIGKILL", "setitimer"):
            monkeypatch.delattr(signal, lacking)

    return become


def test_windows_is_told_by_the_name_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not system.windows()
    with monkeypatch.context() as changed:
        changed.setattr(os, "name", "nt")
        assert system.windows()


def test_a_process_of_its_own_and_its_socket(become: Become) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert system.handing([theirs]) == {"pass_fds": [theirs.fileno()]}
        assert system.apart() == {"start_new_session": True}
        become("win32")
        assert system.handing([theirs]) == {"close_fds": False}
        assert theirs.get_inheritable()
        assert system.apart() == {"creationflags": 0x200}


def test_a_connection_has_a_socket_of_its_own() -> None:
    ours, theirs = socket.socketpair()
    with system.connection(ours) as near, system.connection(theirs) as far:
        ours.close()
        theirs.close()
        near.send_bytes(b"there")
        assert far.recv_bytes() == b"there"


def test_a_group_is_ended_with_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    inner = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], **system.apart()) as process:
        end = time.monotonic() + 30
        while not (pid.is_file() and pid.read_text()) and time.monotonic() < end:
            time.sleep(0.01)
        child = os.pidfd_open(int(pid.read_text()))
        system.kill_all(process)
        assert process.wait(10) == system.KILLED
        assert select.select([child], [], [], 10)[0]  # readable once the process has ended
    os.close(child)
    system.kill_all(process)  # it has ended: nothing


def test_windows_ends_a_tree_by_its_own_command(become: Become, monkeypatch: pytest.MonkeyPatch) -> None:
    become("win32")
    asked: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: asked.append(command))
    system.kill_all(SimpleNamespace(pid=7))
    assert asked == [["taskkill", "/F", "/T", "/PID", "7"]]


def test_macos_and_windows_fork_no_trials(become: Become) -> None:
    assert can_fork("cpu")
    become("darwin")
    assert not can_fork("cpu")
    become("win32")
    assert not can_fork("cpu")


def test_signals_that_a_system_lacks_are_not_asked_for(
    become: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert signal.SIGHUP in interrupts.SIGNALS
    become("win32")
    assert system.ending_signals() == (signal.SIGINT, signal.SIGTERM)
    with limits.time_limit(0.001):  # without a timer it runs to its end
        time.sleep(0.01)


def test_without_locks_nothing_is_swept(become: Become, tmp_path: Path) -> None:
    (left := tmp_path / "kind-abcdefgh").mkdir()
    become("win32")
    assert not list(folders.dead(tmp_path, "kind-"))
    made = folders.make(tmp_path, "kind-")
    assert made.path.is_dir()
    assert left.is_dir()
    made.remove()
    assert not made.path.exists()


def test_one_process_holds_a_lock_file(tmp_path: Path) -> None:
    other = (
        "import sys; from pathlib import Path; from torchwright.core import system\n"
        "with system.locked(Path(sys.argv[1])): Path(sys.argv[2]).write_text('held')"
    )
    with system.locked(tmp_path / "lock"):
        waiting = subprocess.Popen(
            [sys.executable, "-c", other, str(tmp_path / "lock"), str(tmp_path / "told")]
        )
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.5)
        assert not (tmp_path / "told").exists()
    assert waiting.wait(30) == 0
    assert (tmp_path / "told").read_text() == "held"


def test_windows_locks_a_byte_and_tries_again(
    become: Become, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[int, int]] = []

    def locking(descriptor: int, mode: int, count: int) -> None:
        asked.append((mode, count))
        if len(asked) < 3:
            raise PermissionError("held by another")

    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2, LK_UNLCK=0))
    become("win32")
    with system.locked(tmp_path / "lock"):
        assert asked == [(2, 1)] * 3
    assert asked[-1] == (0, 1)


@pytest.mark.parametrize(
    ("name", "suffix", "compiler", "remedy"),
    [
        ("linux", ".so", "g++", "apt-get"),
        ("darwin", ".dylib", "clang++", "xcode-select"),
        ("win32", ".dll", "cl", "Build Tools"),
    ],
)
def test_libraries_and_compilers(
    name: str, suffix: str, compiler: str, remedy: str, become: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(name)
    assert (system.library_suffix(), system.cxx()) == (suffix, compiler)
    assert remedy in system.cxx_remedy()
    monkeypatch.setenv("CXX", "clang++-19")
    assert system.cxx() == "clang++-19"


@pytest.mark.parametrize(
    ("compiler", "takes"),
    [
        ("cl", True),
        (r"C:\VS\bin\CL.EXE", True),
        ("clang-cl.exe", True),
        ("clang++", False),
        ("/usr/bin/g++", False),
    ],
)
def test_microsofts_options(compiler: str, takes: bool) -> None:
    assert system.is_msvc(compiler) is takes
    command = system.program_command(compiler, Path("a.cpp"), Path("a.exe"))
    assert ("/std:c++20" in command) is takes
    assert ("-std=c++20" in command) is not takes


@pytest.mark.skipif(CLANG_CL is None, reason="no clang-cl")
def test_clang_takes_microsofts_options(tmp_path: Path) -> None:
    """Without Windows' headers a program can include none, and is not linked."""
    compiler, source, made = tmp_path / "clang-cl", tmp_path / "a.cpp", tmp_path / "a.obj"
    compiler.symlink_to(str(CLANG_CL))
    source.write_text("int main() {\n#pragma omp parallel for\n  for (int i = 0; i < 3; i++) {}\n}\n")
    command = system.program_command(str(compiler), source, tmp_path / "a.exe")
    target = [
        "--target=x86_64-pc-windows-msvc",
        "/c",
        f"/Fo{made}",
        "-Werror",
        "-Wno-unused-command-line-argument",
    ]
    done = subprocess.run([*command, *target], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert made.read_bytes()[:2] == b"\x64\x86"  # COFF for x86-64


def test_the_kernels_commands_are_those_of_the_system(become: Become) -> None:
    sets = {"avx2": build.X86["avx2"], "portable": ()}

    def commands(name: str) -> tuple[str, str]:
        become(name)
        made = build.compile_commands("clang++", sets, Path("there"))
        return " ".join(made[Path("there/ops.o")]), " ".join(
            build.link_command("clang++", [*made], Path(f"there/kernels{system.library_suffix()}"))
        )

    compiled, linked = commands("linux")
    assert "-fPIC" in compiled
    assert " -fopenmp " in compiled
    assert "-Wl,-rpath," in linked
    compiled, linked = commands("darwin")
    assert "-Xpreprocessor -fopenmp" in compiled
    assert "-lomp" in linked
    assert "kernels.dylib" in linked
    compiled, linked = commands("win32")
    assert "-fPIC" not in compiled  # clang refuses it there
    assert "rpath" not in linked
    assert "kernels.dll" in linked


def test_windows_kernels_want_clang(become: Become, monkeypatch: pytest.MonkeyPatch) -> None:
    become("win32")
    there = {"cl": "C:/VS/cl.exe"}
    monkeypatch.setattr(build.shutil, "which", there.get)
    with pytest.raises(BuildError, match=r"clang\+\+"):
        build.find_compiler()
    there["clang++"] = "C:/LLVM/clang++.exe"
    assert build.find_compiler() == "C:/LLVM/clang++.exe"
    there.clear()
    with pytest.raises(BuildError, match="Build Tools"):
        build.find_compiler()


def test_a_missing_compiler_is_told_with_what_installs_it(
    become: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    become("darwin")
    monkeypatch.setenv("PATH", "")
    probe: Any = toolchain._cpu_fault  # pyright: ignore[reportPrivateUsage]
    assert "xcode-select" in probe.__wrapped__("clang++")


def test_memory_where_proc_does_not_tell(become: Become, monkeypatch: pytest.MonkeyPatch) -> None:
    assert system.peak_memory_bytes() > 2**20
    become("win32")

    def information(process: Any, counters: Any, size: int) -> int:
        counters._obj.PeakWorkingSetSize = 123
        assert size == counters._obj.cb
        return 1

    kernel = SimpleNamespace(GetCurrentProcess=_Function(lambda: 1), K32GetProcessMemoryInfo=information)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    assert system.peak_memory_bytes() == 123


class _Function:
    """One of a library's, whose result has a type."""

    restype: Any = None

    def __init__(self, does: Callable[[], int]) -> None:
        self.does = does

    def __call__(self) -> int:
        return self.does()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("linux", ".cache"), ("darwin", "Library/Caches"), ("win32", "Local")],
)
def test_the_cache_lies_where_the_system_has_it(
    name: str, wanted: str, become: Become, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCHWRIGHT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "Local"))
    become(name)
    assert cache_folder() == tmp_path / wanted / "torchwright"


def test_what_is_linuxs_alone_is_refused_elsewhere(become: Become) -> None:
    command = importlib.import_module("torchwright.serve.command")
    assert system.only_linux("the server") is None
    become("darwin")
    with pytest.raises(WorkloadError, match="cannot run here") as refused:
        command.serve(SimpleNamespace(), print)
    assert "darwin" in str(refused.value)
