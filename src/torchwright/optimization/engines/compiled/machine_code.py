"""The C++ that torch.compile built in a process, kept in a file and put back in another's cache.

torch's own cache keeps graphs and their sources; it leaves out graphs with frozen weights, and always what the C++
compiler made, which on a CPU is most of a compilation. Objects are found again by the hash of source and command line
(`torch._inductor.codecache`), so that one which fits nothing is never loaded.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

from torchwright.core.errors import ArtifactError
from torchwright.core.process.files import replacing
from torchwright.optimization.engines.compiled.compiler_caches import use_private_caches

NAME = re.compile(r"[0-9a-z]{2}/[0-9a-z]+(\.main)?\.so")
LARGEST = 64 * 2**20
"""Bytes of one object; those of whole networks are a few megabytes at most."""


def keep_machine_code(path: Path) -> bool:
    """Write a zip of what this process loaded from Inductor's cache; False, and no file, where it loaded nothing."""
    objects = _loaded()
    if not any(name.endswith(".main.so") for name in objects):
        return False
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in sorted(objects.items()):
            archive.write(file, name)
    return True


def restore_machine_code(path: Path) -> None:
    """Put the objects of `path` in Inductor's cache, unless they are there. Raises `ArtifactError` for another file."""
    folder = use_private_caches()
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            for member in members:
                if not NAME.fullmatch(member.filename) or member.file_size > LARGEST:
                    raise ArtifactError(f"{path} holds what no compiler put there", found=member.filename)
            for member in members:
                if not (folder / member.filename).exists():
                    _write(folder / member.filename, archive.read(member))
    except (zipfile.BadZipFile, EOFError) as error:
        raise ArtifactError(f"{path} cannot be read", found=str(error)) from error


def _loaded() -> dict[str, Path]:
    """Name in the cache → file: objects that this process has mapped, and the probes of the processor's instructions.

    Probes are loaded by children of this process; they are the objects without a `.main`, a few kilobytes each.
    """
    folder = use_private_caches()
    try:
        mapped = {
            line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        }
    except OSError:  # not Linux: every load compiles anew
        return {}
    found = {str(file.relative_to(folder)): file for file in folder.glob("??/*.so")}
    return {
        name: file for name, file in found.items() if str(file) in mapped or not name.endswith(".main.so")
    }


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as beside:
        beside.touch(0o700)
        beside.write_bytes(content)
