# pyright: basic
"""A bundle: what torch.compile and our kernels' compiler made in a process, in a folder for another machine.

    bundle.json      for which calls, on what machine, and the SHA-256 of every other file
    cache.bin        what torch keeps of its compiled graphs: Python's pickles
    code.zip         what its C++ compiler made of them
    kernels/         Torchwright's own, compiled
    signature        of bundle.json, with this user's key

Reading the first two runs code. A bundle that this user made on this machine is unpacked as it is; another's, and a
changed one, with trust alone.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torchwright.core.errors import ArtifactError, WorkloadError
from torchwright.core.json_file import read_json, typed
from torchwright.core.paths import private_cache
from torchwright.core.process.files import replacing
from torchwright.core.process.replacing_folders import writing
from torchwright.core.system import library_suffix
from torchwright.hardware.kernels.cpu import build
from torchwright.optimization.artifact.sealed import digests, is_own, not_as_written, seal
from torchwright.optimization.caches.place import BuildEnvironment, place_here
from torchwright.optimization.engines.jit import CODE, GRAPHS, keep_compiled, restore_compiled

BUNDLE, KERNELS = "bundle.json", "kernels"
FORMAT = 1
PICKLES = (
    f"torch keeps its compiled graphs as pickles ({GRAPHS}), and {CODE} is machine code: reading either runs what "
    "their writer wants"
)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """The folder's contents."""

    format: int = FORMAT
    made_by: str
    """The model, or what else was compiled, as its user calls it."""
    calls: tuple[str, ...] = ()
    """Types and shapes of the calls that were compiled; none where they were not noted."""
    place: BuildEnvironment
    files: dict[str, str] = field(default_factory=dict)
    """Relative path → SHA-256."""


def pack(path: str | Path, *, made_by: str = "this process", calls: Sequence[str] = ()) -> Bundle:
    """Write what this process has compiled so far to a folder; another bundle there is replaced.

    Raises `WorkloadError` where it has compiled nothing that can be kept, and `ArtifactError` where something else lies
    there.
    """
    with writing(Path(path), _no_bundle) as folder:
        if reason := keep_compiled(folder):
            raise WorkloadError("there is nothing to pack", found=reason, next="call a compiled model first")
        if (library := _kernels()) is not None:
            (folder / KERNELS).mkdir()
            shutil.copyfile(library, folder / KERNELS / library.name)
        bundle = Bundle(
            made_by=made_by, calls=tuple(calls), place=place_here(), files=digests(folder / BUNDLE)
        )
        (folder / BUNDLE).write_text(json.dumps(asdict(bundle), indent=2) + "\n", encoding="utf-8")
        seal(folder / BUNDLE)
    return bundle


def read(path: str | Path) -> Bundle:
    """Read a bundle's description without running any of its code. Raises `ArtifactError`."""
    file = Path(path) / BUNDLE
    if not file.is_file():
        raise ArtifactError(
            f"{path} is no bundle", found=f"no {BUNDLE}", next="`torchwright cache pack` writes one"
        )
    return typed(read_json(file), Bundle, str(file))


def unpack(path: str | Path, *, trust: bool = False) -> Bundle:
    """Install a bundle where torch.compile and our kernels look for compiled code.

    Existing files are left alone. Raises `ArtifactError` for a bundle that torch cannot read and, without `trust`, for
    one that has changed since it was written or that somebody else wrote.
    """
    path = Path(path)
    bundle = read(path)
    if not trust and (wrong := not_as_written(path / BUNDLE, bundle.files)):
        raise ArtifactError(
            f"{path} is not as it was packed", found=", ".join(wrong)[:300], next="pack it again"
        )
    if not trust and not is_own(path / BUNDLE):
        raise ArtifactError(
            f"{path} was not packed by this user on this machine",
            found=PICKLES,
            next="trust=True, or --trust, unpacks it: for bundles of people whose programs you would run",
        )
    if reason := restore_compiled(path):
        raise ArtifactError(f"{path} is of no use here", found=reason, next="pack it again, on this torch")
    for library in sorted((path / KERNELS).glob(f"torchwright-*{library_suffix()}")):
        place = private_cache(KERNELS) / library.name
        if not place.exists():
            with replacing(place) as beside:
                shutil.copyfile(library, beside)
    return bundle


def _kernels() -> Path | None:
    """The library of our kernels, where this user has one for these sources and this torch."""
    with contextlib.suppress(build.BuildError):
        compiler = build.find_compiler()
        library = build.place(compiler, build.instruction_sets(compiler))
        return library if library.is_file() else None
    return None


def _no_bundle(path: Path) -> str | None:
    if path.is_symlink() or not path.is_dir():
        return "a link" if path.is_symlink() else "a file"
    try:
        wrong = not_as_written(path / BUNDLE, read(path).files)
    except ArtifactError as error:
        return error.reason
    return f"{wrong[0]} is not as it was packed" if wrong else None
