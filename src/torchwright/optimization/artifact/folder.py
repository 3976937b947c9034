# pyright: basic
"""The artifact: a folder that holds everything a result needs, written whole or not at all, checked when it is read.

    recipe.json          what was done, the numbers and the reasons
    manifest.json        how to run it, and the SHA-256 of every other file
    programs.json, .safetensors   the transformed graphs, portable (where the model exports)
    model/               config, tokenizer and, where there are no graphs, weights (Hugging Face models)
    native/              compiled code for this machine
    draft/               a draft model that proposes tokens when a language model is served
    signature            of the manifest, with a key that never leaves the user's cache folder
    selftest.json, .safetensors   inputs and the outputs they must give
    report.html

Nothing here is pickled. Native code is loaded only when the signature is this user's own, or when the caller says
`trust`; otherwise, and on another machine or torch version, the graphs are compiled afresh. If no key can be kept,
the artifact is unsigned, and untrusted everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from torchwright.core.errors import ArtifactError
from torchwright.core.json_file import read_bytes, read_json, typed
from torchwright.core.paths import cache_folder, file_digest, private_folder
from torchwright.core.process import replacing_folders
from torchwright.core.process.replacing_folders import MARK as MARK
from torchwright.core.process.replacing_folders import steady
from torchwright.core.records import RECIPE_FORMAT, Fingerprint, Recipe, to_json
from torchwright.optimization.engines.base import MODEL as MODEL
from torchwright.optimization.engines.base import NATIVE as NATIVE
from torchwright.optimization.engines.base import ShippingForm, engines
from torchwright.optimization.engines.dispatch.spec import CallSpec, InputCapabilities, package_file

RECIPE, MANIFEST, REPORT = "recipe.json", "manifest.json", "report.html"
SIGNATURE = "signature"
DRAFT = "draft"
"""The folder that the step of this name keeps its files in."""
ROWS, GENERAL, ONE_GRAPH = "any number of rows", "any sizes", "one row, other sizes"
"""Names of graphs other than those of the example's calls."""
ROWS_PACKAGE = "package-rows.pt2"
ONE, ONE_PACKAGE = "one row", "package-one.pt2"
"""In a folder that is being written; what has it is ours to remove."""
LARGEST = 64 * 2**20
"""Bytes of RECIPE and of MANIFEST."""
MOST_FILES = 100_000
T = TypeVar("T")
DTYPES = ("float32", "float64", "bfloat16", "float16")
MOST_THREADS = 4096
DIGEST = re.compile(r"[0-9a-f]{64}")
SIGNED = re.compile(rb"([0-9a-f]{64})\n?")
KEY_BYTES = 32
KEY_SECONDS = 2.0
"""Seconds that another process may take to write the key that it has begun."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest: how to run an artifact."""

    format: int = RECIPE_FORMAT
    engine: str
    dtype: str
    threads: int | None = None
    way: ShippingForm | Literal[""] = ""
    """The measured path. Artifacts of earlier versions lack it."""
    calls: tuple[CallSpec, ...] = ()
    """Names of the packages, in their order."""
    rows: Literal["free", "both", "pieces", "fixed"] = "fixed"
    """Which packages there are for other numbers of rows (`optimization/trial/batch_variants.py`)."""
    by_rows: tuple[tuple[int, str], ...] = ()
    """Pairs (smallest batch size, name of the call that was fastest from there on), ascending."""
    any_rows: CallSpec | None = None
    one_row: CallSpec | None = None
    any_sizes: CallSpec | None = None
    one_graph: CallSpec | None = None
    """The graph for batch size 1, where no other call takes it."""
    takes: InputCapabilities = field(default_factory=InputCapabilities)
    layouts: tuple[tuple[int, ...] | None, ...] = ()
    """For each output, the original's order of dimensions in memory where the compiled code has another."""
    cases: tuple[str, ...] = ()
    """Names of the calls, in the order of the packages."""
    signatures: dict[str, str] = field(default_factory=dict)
    """The value in artifacts of earlier versions."""
    self_contained: bool = True
    served_as: Literal["", "writer", "reader", "recognizer", "painter", "translator"] | None = None
    """The value of `Workload.served_as`, readable without torch; artifacts of earlier versions lack it."""
    files: dict[str, str] = field(default_factory=dict)
    """Relative path → SHA-256 in hexadecimal; everything but this file and the signature."""

    @property
    def measured_on_module(self) -> bool:
        """Check whether the recipe was measured on the caller's module. With `self_contained` a graph answers without
        it.
        """
        return self.way == "module" or not self.self_contained


def packages(names: Sequence[str], rows: str, one_row: CallSpec | None) -> list[tuple[str, str]]:
    """(name of the call, file of its package) of what is compiled; `names` are those of the example's calls."""
    fixed = [(name, package_file(index)) for index, name in enumerate(names)]
    free = [(ROWS, ROWS_PACKAGE)]
    one = [(ONE, ONE_PACKAGE)] if one_row is not None else []
    return {"free": free, "both": [*fixed, *free]}.get(rows, fixed) + one


def writing(path: Path) -> contextlib.AbstractContextManager[Path]:
    """Return the context in which an artifact is written; `process.replacing_folders.writing` says how."""
    return replacing_folders.writing(path, _not_ours)


def put_back(path: Path) -> None:
    """Bring back the artifact that a dead process had moved aside; what is anything else stays where it is."""
    replacing_folders.put_back(path, _not_ours)


def _not_ours(path: Path) -> str | None:
    """Return the sign that a folder holds anything but one whole artifact, or None."""
    if path.is_symlink() or not path.is_dir():
        return "a link" if path.is_symlink() else "a file"
    try:
        open_artifact(path)
    except ArtifactError as error:
        return f"{error.summary}: {error.found}" if error.found else error.summary
    return None


def finish(folder: Path, recipe: Recipe, manifest: dict[str, Any]) -> str | None:
    """Write the recipe, and the manifest with the checksums of everything else, and sign the manifest.

    Returns a notice if the signing key is missing: the artifact is whole, but unsigned.
    """
    (folder / RECIPE).write_text(to_json(recipe), encoding="utf-8")
    names = [name for name in _names(folder) if name != MARK]
    for name in names:  # safetensors writes files that nobody else may read
        (folder / name).chmod((folder / RECIPE).stat().st_mode)
    files = {name: file_digest(folder / name) for name in names}
    from torchwright.workloads.base import class_of

    served_as = class_of(recipe.workload).served_as(recipe.workload)
    whole = Manifest(**manifest, served_as=served_as, files=files)
    (folder / MANIFEST).write_text(json.dumps(asdict(whole), indent=2) + "\n", encoding="utf-8")
    signed = sign(folder / MANIFEST)
    if signed is None:
        return (
            f"the artifact is not signed, since no key can be kept in {cache_folder()}: loading its compiled code "
            "takes trust=True or --trust"
        )
    (folder / SIGNATURE).write_text(signed, encoding="utf-8")
    return None


def open_artifact(path: Path) -> tuple[Recipe, Manifest]:
    """Return the recipe and manifest of an artifact whose every file is whole.

    Raises `ArtifactError` for a missing folder, one that is not an artifact, and a newer format. So it does for an
    invalid recipe, and for a file that is missing, added or changed.
    """
    return steady(path, lambda: _opened(path))


def _opened(path: Path) -> tuple[Recipe, Manifest]:
    with checked_meanwhile(path) as (recipe, manifest, _):
        return recipe, manifest


def read_recipe(path: Path) -> Recipe:
    """Return the recipe of an artifact, to be printed.

    The checks are those of `open_artifact`, except that no workload is made of the recipe: this imports no torch.
    """

    def read() -> Recipe:
        recipe, manifest = _read(path)
        _check_names(path, manifest)
        _check_contents(path, manifest)
        return recipe

    return steady(path, read)


def report_path(path: Path) -> Path:
    """Return the path of an artifact's report.html; raises `ArtifactError` if it is missing."""
    file = path / REPORT
    if not file.is_file():
        raise ArtifactError(
            f"there is no {REPORT} in {path}", next="`torchwright optimize -o DIR` writes one"
        )
    return file


@contextmanager
def checked_meanwhile(path: Path) -> Iterator[tuple[Recipe, Manifest, Callable[[], None]]]:
    """The recipe and manifest, while a thread compares the files' checksums; leaving waits for it.

    Calling the third waits at once, and must come before anything of the files is run. Raises as `open_artifact` does,
    a file that has changed there or on leaving.
    """
    recipe, manifest = _read(path)
    _check_workload(path, recipe.workload)
    _check_names(path, manifest)
    with ThreadPoolExecutor(1, thread_name_prefix="checksums") as pool:
        check = pool.submit(_check_contents, path, manifest)
        try:
            yield recipe, manifest, check.result
        except BaseException:
            check.result()  # damage is the better reason for whatever failed meanwhile
            raise
        check.result()


def _read(path: Path) -> tuple[Recipe, Manifest]:
    if not path.is_dir():
        raise ArtifactError(
            f"there is no artifact at {path}", next="`torchwright optimize -o DIR` writes one"
        )
    for name in (RECIPE, MANIFEST):
        if not (path / name).is_file():
            raise ArtifactError(f"{path} is not an artifact", found=f"no {name}", next="optimize again")
    _check_links(path)
    recipe, manifest = _parsed(path / RECIPE, Recipe), _parsed(path / MANIFEST, Manifest)
    _check_engine(path, recipe.engine)
    _check_engine(path, manifest.engine)
    _check_manifest(path, manifest)
    _signed(path)
    return recipe, manifest


def _parsed(path: Path, kind: type[T]) -> T:
    """The value in a JSON file, held against the type that it is written from."""
    data = read_json(path, largest=LARGEST)
    version = data.get("format") if isinstance(data, dict) else None
    if isinstance(version, int) and version > RECIPE_FORMAT:
        raise ArtifactError(
            f"{path} was written by a newer Torchwright",
            found=f"format {version}",
            allowed=f"up to {RECIPE_FORMAT}",
            next="`pip install -U torchwright`",
        )
    return typed(data, kind, str(path))


def _check_engine(path: Path, name: str) -> None:
    if name not in engines.names():
        remedy = "install the package that brings it, or optimize again"
        raise _damaged(path, f"the engine {name[:80]!r}", remedy)


def _check_manifest(path: Path, manifest: Manifest) -> None:
    """Check what the types of the fields do not say."""
    threads = manifest.threads
    if manifest.dtype not in DTYPES:
        raise _damaged(path, f"the dtype {manifest.dtype[:80]!r}")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise _damaged(path, f"{threads} threads")
    if len(set(manifest.cases)) != len(manifest.cases):
        raise _damaged(path, "two calls of one name")
    if len(manifest.files) > MOST_FILES:
        raise _damaged(path, f"{len(manifest.files):,} files")
    for name, digest in manifest.files.items():
        if not (_is_inside(name) and DIGEST.fullmatch(digest)):
            raise _damaged(path, f"the file {_shown(name)!r} with the checksum {digest[:80]!r}")


def _check_workload(path: Path, workload: dict[str, Any]) -> None:
    """Check the parts of a recipe's workload that are read without building one; its class checks the rest."""
    from torchwright.workloads.base import class_of

    cls = class_of(workload)
    try:
        cls.check(workload)
    except ArtifactError as error:
        raise _damaged(path, f"workload: {error}") from error


def _check_links(path: Path) -> None:
    """Refuse what is neither a file nor a folder, and links that lead out of the artifact or to a folder."""
    inside = path.resolve()
    for folder, below, files in os.walk(path):
        for entry in (Path(folder, name) for name in (*below, *files)):
            leads_out = entry.is_symlink() and not (
                entry.is_file() and entry.resolve().is_relative_to(inside)
            )
            if leads_out or not (entry.is_file() or entry.is_dir()):
                raise _damaged(path, f"{_shown(entry.relative_to(path))} leads out of it")


def _is_inside(name: str) -> bool:
    """Check whether a file name of the manifest is plain, relative, and stays inside the folder."""
    return (
        0 < len(name) <= 1000
        and name.isprintable()
        and "\\" not in name
        and not any(part in ("", ".", "..") for part in name.split("/"))
    )


def is_own(path: Path) -> bool:
    """Check whether this user made the artifact on this machine, byte for byte (its files are checked already)."""
    try:
        signed, expected = _signed(path), sign(path / MANIFEST)
    except (ArtifactError, OSError):
        return False
    return signed is not None and expected is not None and hmac.compare_digest(signed, expected)


def _signed(path: Path) -> str | None:
    """The signature of an artifact, or None where it has none; raises `ArtifactError` for one that cannot be one."""
    if not (path / SIGNATURE).is_file():
        return None
    found = SIGNED.fullmatch(read_bytes(path / SIGNATURE, 1000))
    if found is None:
        raise _damaged(
            path, f"the {SIGNATURE} is not one", "remove it, or load the artifact as it was written"
        )
    return found[1].decode()


def same_machine(recipe: Fingerprint, here: Fingerprint) -> str | None:
    """Return the difference between two machines as far as compiled code is concerned, or None."""
    pairs = {
        "torch": (recipe.torch, here.torch),
        "device": (recipe.device.kind, here.device.kind),
        "processor": (recipe.device.name, here.device.name),
        "ISA": (sorted(recipe.device.isa), sorted(here.device.isa)),
    }
    for name, (then, now) in pairs.items():
        if then != now:
            return f"{name}: {_short(then)} then, {_short(now)} now"
    return None


def sign(path: Path) -> str | None:
    """HMAC of a file with this user's key, or None where no key can be kept."""
    try:
        key = _key()
    except OSError:
        return None
    return hmac.new(key, path.read_bytes(), hashlib.sha256).hexdigest()


def _key() -> bytes:
    """This user's key, made at its first use; raises `OSError` where it can be neither read nor written."""
    path = private_folder(cache_folder()) / "signing.key"
    if not path.exists():
        with contextlib.suppress(FileExistsError):  # another process makes it
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
    patience = time.monotonic() + KEY_SECONDS
    while len(key := path.read_bytes()) != KEY_BYTES:
        if time.monotonic() > patience:
            raise OSError(f"{path} holds {len(key)} bytes instead of a key")
        time.sleep(0.01)
    return key


def _names(folder: Path) -> list[str]:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return [name for name in names if name not in (MANIFEST, SIGNATURE)]


def _check_names(path: Path, manifest: Manifest) -> None:
    present, listed = set(_names(path)), set(manifest.files)
    for name in sorted(listed - present):
        raise _damaged(path, f"{_shown(name)} is missing", "optimize again, or restore the file")
    for name in sorted(present - listed):
        raise _damaged(path, f"{_shown(name)} does not belong to it", f"remove {_shown(name)}")


def _check_contents(path: Path, manifest: Manifest) -> None:
    for name, expected in manifest.files.items():
        if file_digest(path / name) != expected:
            raise _damaged(path, f"{name} has changed since it was written")


def _damaged(path: Path, found: str, next: str = "optimize again") -> ArtifactError:
    return ArtifactError(f"{path} is damaged", found=found, next=next)


def _shown(name: str | Path) -> str:
    """A file's name as text that can be printed, whatever bytes it is made of."""
    return os.fsencode(name).decode(errors="backslashreplace")[:200]


def _short(value: Any) -> str:
    return str(value) if not isinstance(value, list) else f"{len(value)} features"
