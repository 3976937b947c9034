"""Compiles csrc/ at first use, once for each version of the sources, the compiler and torch.

python -m torchwright_sim.build        ahead of the first use, into the folder that it prints
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).with_name("csrc")
SECONDS = 600
"""A compiler that takes longer hangs: a busy core needs about a minute."""


class BuildError(RuntimeError):
    """The library could not be compiled; the text says why."""


def library(*, build: bool = True) -> Path | None:
    """Return the compiled library; None if it is not there and `build` is false. Raises `BuildError`."""
    path = _place()
    if not build and not path.is_file():
        return None
    _own(path.parent)
    with (path.parent / "sim.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_file():
            _compile(path)
    return path


def _place() -> Path:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(repr((_flags(), str(torch.__version__), platform.machine())).encode())
    return _folder() / f"sim-{digest.hexdigest()[:20]}.so"


def _folder() -> Path:
    """Return Torchwright's cache folder, by the rules of Torchwright, which need not be installed."""
    if named := os.environ.get("TORCHWRIGHT_CACHE"):
        return Path(named) / "sim"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "torchwright" / "sim"


def _own(folder: Path) -> None:
    """Make a folder that nobody else can write to: code is loaded from it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise BuildError(
            f"{folder} belongs to somebody else or others may write to it; code is not loaded from there"
        )


def _flags() -> list[str]:
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    # torch's headers ask for C++20 since 2.14. Nothing here computes: the least optimisation compiles in half the time.
    return ["-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-psabi", abi]


def _compile(path: Path) -> None:
    wanted = os.environ.get("CXX") or "c++"
    compiler = shutil.which(wanted)
    if compiler is None:
        raise BuildError(
            f"simulated devices need a C++ compiler, once, and {wanted} was not found; install g++"
        )
    root = Path(torch.__file__).parent
    include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as scratch:
        made = Path(scratch) / path.name
        command = [compiler, *_flags(), *include, str(SOURCES / "backend.cpp"), "-o", str(made)]
        command += [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise BuildError(f"the C++ compiler took more than {SECONDS} s") from None
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr.strip()]
            raise BuildError(f"the C++ compiler failed: {errors[0][:500]}")
        _try(made)
        made.replace(path)


def _try(library: Path) -> None:
    """Load a library in a process of its own: a registration that PyTorch refuses ends the process."""
    code = "import sys, torch; torch.ops.load_library(sys.argv[1])"
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(library)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise BuildError(f"the compiled library cannot be loaded: {' '.join(said)[:500]}")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        print(library())
