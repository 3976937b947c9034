# pyright: basic
"""The folder of an export: the runtime's own files, the reference, and the report.

package/       what the runtime reads: all that has to travel
reference/     the original's answers, and the graph that was converted, for `--check`
export.json    target, call, versions, report, and the SHA-256 of every other file
signature      of export.json, with this user's key
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from torchwright.core.errors import ArtifactError
from torchwright.core.json_file import read_json, typed
from torchwright.core.process.replacing_folders import steady, writing
from torchwright.exporter.base import exports
from torchwright.optimization.artifact.sealed import digests, is_own, not_as_written, seal
from torchwright.optimization.engines.dispatch.spec import CallSpec

EXPORT, PACKAGE, REFERENCE = "export.json", "package", "reference"
FORMAT = 1
SYSTEMS = re.compile(r"\(os error (\d+)\)")


@dataclass(frozen=True, kw_only=True)
class Export:
    """The folder's contents, and the findings when it was written."""

    format: int = FORMAT
    target: str
    precision: str
    model: str
    """The user's name for it."""
    call: CallSpec
    threads: int
    versions: dict[str, str]
    operators: dict[str, int] = field(default_factory=dict)
    carried: tuple[str, ...] = ()
    """Steps of the recipe that are in it."""
    left: dict[str, str] = field(default_factory=dict)
    """Steps that are not, each with its reason."""
    notes: tuple[str, ...] = ()
    planned: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes of memory that are planned ahead, where the runtime does: by method, and by value."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds per kind of undelegated operator in the example's call, if its runtime has no profiler of its own."""
    parting: str = ""
    """The first layer that the target's own rounding throws off, where its runtime could not show it."""
    delegate: str = ""
    """The delegate, if the target has several."""
    report: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Relative path → SHA-256."""


@contextmanager
def writing_export(path: Path) -> Iterator[Path]:
    """A folder that takes the place of `path` when it is whole; another export there is replaced, nothing else is."""
    with writing(path, _no_export) as folder, _errors_of_the_system():
        yield empty_export(folder)


@contextmanager
def _errors_of_the_system() -> Iterator[None]:
    """A full disk as safetensors tells it, as the error that it is."""
    try:
        yield
    except SafetensorError as error:
        if (number := SYSTEMS.search(str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def empty_export(folder: Path) -> Path:
    """`folder` with the two folders of an export."""
    (folder / PACKAGE).mkdir(parents=True)
    (folder / REFERENCE).mkdir()
    return folder


def finish(folder: Path, export: Export) -> Export:
    """Write export.json with every file's checksum, and sign it."""
    whole = replace(export, files=digests(folder / EXPORT))
    (folder / EXPORT).write_text(json.dumps(asdict(whole), indent=2) + "\n", encoding="utf-8")
    seal(folder / EXPORT)
    return whole


def open_export(path: Path, *, trust: bool = False) -> tuple[Export, list[str]]:
    """Read export.json, and list the files that have changed since they were written.

    Changed files, and those that somebody else wrote, are opened with `trust` alone: no runtime promises to withstand
    a file that was made to harm it. Raises `ArtifactError`.
    """
    return steady(path, lambda: _opened(path, trust))


def _opened(path: Path, trust: bool) -> tuple[Export, list[str]]:
    if not (path / EXPORT).is_file():
        raise ArtifactError(
            f"{path} is no export", found=f"no {EXPORT}", next="`torchwright export` writes one"
        )
    export = typed(read_json(path / EXPORT), Export, str(path / EXPORT))
    exports.get(export.target)
    wrong = not_as_written(path / EXPORT, export.files)
    if not trust and wrong:
        raise ArtifactError(
            f"{path} is not as it was written",
            found=f"changed, missing or added: {', '.join(wrong)[:300]}",
            next="export again; --trust runs it all the same, and says what is wrong with it",
        )
    if not trust and not is_own(path / EXPORT):
        raise ArtifactError(
            f"{path} was not written by this user on this machine", next="trust=True, or --trust, opens it"
        )
    return export, wrong


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _no_export(path: Path) -> str | None:
    if path.is_symlink() or not path.is_dir():
        return "a link" if path.is_symlink() else "a file"
    try:
        open_export(path)
    except ArtifactError as error:
        return error.reason
    return None
