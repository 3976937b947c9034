"""Compiles the C++ of `csrc/` on first use: once per version of the sources, the flags, the compiler and torch.

One object file per instruction set, chosen at run time (`TORCHWRIGHT_ISA` forces one). A library built here thus runs
on a lesser machine that shares the cache folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from torchwright.core import system
from torchwright.core.paths import UnsafeFolder, cache_folder, private_folder
from torchwright.core.process import folders
from torchwright.core.process.files import replacing
from torchwright.hardware.kernels import fake

log = logging.getLogger("torchwright.hardware.kernels")

SOURCES = Path(__file__).with_name("csrc")
SCRATCH = "building-"
"""Names of unfinished builds next to the library; the next build removes those of killed ones."""
SECONDS = 1200
"""A compiler that takes longer hangs: it takes up to 60 s of a core, and twenty times that on a busy machine."""
TOLD_AGAIN = 600
"""Seconds for which a failure is reported again without a build, which would take a minute in each trial."""
COMMON = ("-fvisibility=hidden", "-Wno-psabi", "-ffp-contract=off")
"""No contraction: the compiler would fuse a product and a sum in one tile size and not in another.

A row's result would then depend on its neighbours. Kernels that want a fused operation write one."""
X86 = {
    "amx": ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    "avx512": ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
    "avx2_vnni": ("-march=x86-64-v3", "-mavxvnni"),
    "avx2": ("-march=x86-64-v3",),
}
"""Instruction set → compiler flags; `portable` has none."""
ARM = {
    "bf16": ("-march=armv8.2-a+dotprod+i8mm+bf16", "-DTW_NEON"),
    "i8mm": ("-march=armv8.2-a+dotprod+i8mm", "-DTW_NEON"),
    "dotprod": ("-march=armv8.2-a+dotprod", "-DTW_NEON"),
    "neon": ("-march=armv8-a", "-DTW_NEON"),
}
"""The same of 64-bit Arm, where every processor has NEON. `csrc/levels.h` asks the system for what the flags allow."""


AHEAD = "TORCHWRIGHT_KERNELS"
"""Names the folder of a library that was built ahead."""
PACKAGED = Path(__file__).with_name("prebuilt")
"""The libraries that a wheel of `make wheel` brings, one for each torch; other installations have none."""


class BuildError(Exception):
    """The kernels could not be compiled; the text says why and what mends it."""


_outcome: list[str | None] = []
"""The result of the first `load_fault`: a plain list, since torch.compile would trace into `functools.cache`."""


def load_fault() -> str | None:
    """Compile the kernels where needed and register their operators: the fault that prevented it, or None."""
    if not _outcome:
        _outcome.append(attempt())
    return _outcome[0]


def attempt() -> str | None:
    """`load_fault`, tried again."""
    try:
        torch.ops.load_library(str(library()))
    except (BuildError, OSError) as error:
        return f"{error} ({error.__cause__})" if error.__cause__ else str(error)
    fake.register()
    return None


def library() -> Path:
    """Return the compiled library; building it takes a minute or two of one core, and a warning reports it.

    `TORCHWRIGHT_KERNELS` names a folder with a library that was built ahead, in an image for example; it needs no
    compiler, and no other library is taken then. Raises `BuildError` if that folder holds none for these sources and
    this torch. Without the folder, a wheel's own library for this torch is taken before a compiler is asked. Raises
    `BuildError` without a compiler, or if that fails or did some minutes ago (`forget` asks it again).
    """
    if ahead := os.environ.get(AHEAD):
        return _built_ahead(Path(ahead))
    if packaged := _packaged():
        return packaged
    compiler = find_compiler()
    sets = instruction_sets(compiler)
    path = place(compiler, sets)
    try:
        private_folder(path.parent)
    except UnsafeFolder as error:
        raise BuildError(str(error)) from None
    if path.is_file():
        return path
    with system.locked(path.parent / "lock"):
        if not path.is_file():
            _raise_again(path)
            log.warning("torchwright: compiling the kernels, once for this version")
            try:
                _build(compiler, sets, path)
            except BuildError as error:
                _failure(path).write_text(str(error), encoding="utf-8")
                raise
    return path


def build_ahead(folder: Path) -> Path:
    """Compile the library, or take the one that is there, and put it into `folder` for `TORCHWRIGHT_KERNELS`."""
    built = library()
    private_folder(folder)
    path = folder / name_ahead()
    with replacing(path) as beside:
        shutil.copyfile(built, beside)
    return path


def _built_ahead(folder: Path) -> Path:
    try:
        path = private_folder(folder) / name_ahead()
    except (UnsafeFolder, OSError) as error:
        raise BuildError(str(error)) from None
    if not path.is_file():
        found = ", ".join(sorted(file.name for file in folder.iterdir())[:5]) or "nothing"
        raise BuildError(
            f"{AHEAD} names {folder}, which holds no {path.name}, the library of these sources, torch "
            f"{torch.__version__} and {platform.machine()} (found: {found}); where there is a compiler, `torchwright "
            f"doctor --build --into {folder}` writes it"
        )
    return path


def _packaged() -> Path | None:
    """Return the wheel's own library for this torch, if this is such an installation: only then are sources read."""
    if not PACKAGED.is_dir():
        return None
    path = PACKAGED / name_ahead()
    return path if path.is_file() else None


def name_ahead(torch_version: str | None = None) -> str:
    """Return the name of the library of these sources for this torch or the given one, whatever compiler made it.

    Builds of one version for CPUs and for cards share it: the library links to `libtorch_cpu` and `libc10` alone.
    """
    digest = _digest_of_sources()
    digest.update(platform.machine().encode())
    version = str(torch_version or torch.__version__).partition("+")[0]
    return f"torchwright-ahead-{digest.hexdigest()[:16]}-torch-{version}{system.library_suffix()}"


def ready() -> bool:
    """Check whether the library is built already, or cannot be."""
    if os.environ.get(AHEAD) or _packaged():
        return True
    try:
        compiler = find_compiler()
        path = place(compiler, instruction_sets(compiler))
        _raise_again(path)
        return path.is_file()
    except BuildError:
        return True


def forget() -> None:
    """A failure that was kept, so that the next `library` asks the compiler."""
    for path in (cache_folder() / "kernels").glob("*.failed"):
        path.unlink(missing_ok=True)


def _failure(library: Path) -> Path:
    return library.with_suffix(".failed")


def _raise_again(library: Path) -> None:
    """`BuildError` as another process met it a while ago."""
    path = _failure(library)
    with contextlib.suppress(FileNotFoundError):
        if 0 <= time.time() - path.stat().st_mtime < TOLD_AGAIN:
            raise BuildError(path.read_text(encoding="utf-8"))


def find_compiler() -> str:
    """The C++ compiler of this machine, or the one that CXX names."""
    wanted = system.cxx()
    if system.is_msvc(wanted) and shutil.which("clang++"):
        wanted = "clang++"  # the kernels' vectors are written as GCC and Clang have them
    compiler = shutil.which(wanted)
    if compiler is None:
        raise BuildError(f"no C++ compiler was found ({wanted}); {system.cxx_remedy()}")
    if system.is_msvc(compiler):
        raise BuildError(
            f"{compiler} does not take the kernels' vectors; install LLVM, or set CXX to its clang++"
        )
    return compiler


def place(compiler: str, sets: dict[str, tuple[str, ...]]) -> Path:
    """Return the path of the library of these sources, commands and versions."""
    digest = _digest_of_sources()
    commands = [*compile_commands(compiler, sets, Path()).values(), link_command(compiler, [], Path())]
    version = _run([compiler, "--version"]).stdout
    said = repr((version, commands, torch.__version__, platform.machine()))
    digest.update(said.replace(str(SOURCES), "").encode())  # another checkout of the same sources shares it
    return cache_folder() / "kernels" / f"torchwright-{digest.hexdigest()[:16]}{system.library_suffix()}"


def _digest_of_sources() -> Any:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest


def compile_commands(compiler: str, sets: dict[str, tuple[str, ...]], folder: Path) -> dict[Path, list[str]]:
    """Object file → the command that makes it."""
    commands: dict[Path, list[str]] = {}
    common = ("-std=c++20", *system.shared_code(), *COMMON)  # torch's headers ask for C++20 since 2.14
    for name, flags in sets.items():
        target = folder / f"{name}.o"
        # With vector instructions the portable code is only for very old machines. At the level at which the compiler
        # vectorizes by itself that code takes as long to compile as all others together.
        last = name == "portable" and len(sets) > 1
        commands[target] = [
            compiler,
            "-O2" if last else "-O3",
            *common,
            *flags,
            f"-DTW_ISA={name}",
            "-c",
            str(SOURCES / "table.cpp"),
        ]
    root = Path(torch.__file__).parent / "include"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    have = [f"-DTW_HAVE_{name.upper()}" for name in sets]
    include = [f"-I{root}", f"-I{root / 'torch/csrc/api/include'}"]
    commands[folder / "ops.o"] = [
        *(compiler, "-O2", *common, *system.openmp(), abi, *have, *include),
        *("-c", str(SOURCES / "ops.cpp")),
    ]
    return {target: [*command, "-o", str(target)] for target, command in commands.items()}


def link_command(compiler: str, objects: list[Path], path: Path) -> list[str]:
    """Return the command that links the objects, those for the least processors first.

    The linker keeps the first copy of an inline function that several objects hold. From a better instruction set's
    object, that copy would be an illegal instruction for all others.
    """
    libraries = Path(torch.__file__).parent / "lib"
    objects = objects[::-1]
    return [
        *(compiler, "-shared", *system.openmp_library(), *map(str, objects), "-o", str(path)),
        *(f"-L{libraries}", "-ltorch_cpu", "-lc10", *system.found_beside(libraries)),
    ]


def _build(compiler: str, sets: dict[str, tuple[str, ...]], path: Path) -> None:
    folders.sweep(path.parent, SCRATCH)
    scratch = folders.make(path.parent, SCRATCH)
    try:
        commands = compile_commands(compiler, sets, scratch.path)
        linked = scratch.path / f"kernels{system.library_suffix()}"
        _together([*commands.values()], scratch.path)
        _together([link_command(compiler, list(commands), linked)], scratch.path)
        linked.replace(path)
    finally:
        scratch.remove()


def _together(commands: list[list[str]], scratch: Path) -> None:
    """Run them side by side; the first that fails stops the others, with the processes that they started."""
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with contextlib.ExitStack() as stack:
        running: list[subprocess.Popen[str]] = []
        for command in commands:
            process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                **system.apart(),
            )
            running.append(stack.enter_context(process))
            stack.callback(_kill, process)
        for process in running:
            _wait(process)


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        system.kill_all(process)


def _wait(process: subprocess.Popen[str]) -> None:
    try:
        _, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise BuildError(f"the C++ compiler took more than {SECONDS} s") from None
    if process.returncode:
        lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines()[-1:]
        raise BuildError(f"the C++ compiler failed: {lines[0].strip()[:300] if lines else 'no message'}")


def instruction_sets(compiler: str) -> dict[str, tuple[str, ...]]:
    """The instruction sets of this architecture that the compiler and its assembler know."""
    known = {name: flags for name, flags in architecture().items() if _accepts(compiler, flags)}
    return {**known, "portable": ()}


def architecture() -> dict[str, tuple[str, ...]]:
    """Return the instruction sets of this machine's architecture, the best first, with their flags."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return X86
    return ARM if machine in ("aarch64", "arm64") else {}


@functools.cache
def _accepts(compiler: str, flags: tuple[str, ...]) -> bool:
    """Compile an empty file: GCC for Arm names the extensions to the assembler, which may be older than GCC."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [compiler, *flags, "-x", "c++", "-c", os.devnull, "-o", str(Path(scratch) / "empty.o")]
        return _run(command).returncode == 0


def _run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(command, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise BuildError(f"the C++ compiler took more than {SECONDS} s") from None
