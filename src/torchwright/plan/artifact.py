# pyright: basic
"""The artifact: a folder that holds everything a result needs, written whole or not at all, checked when it is read.

    recipe.json          what was done, the numbers and the reasons
    manifest.json        how to run it, and the SHA-256 of every other file
    programs.json, .safetensors   the transformed graphs, portable (where the model exports)
    model/               config, tokenizer and, where there are no graphs, weights (Hugging Face models)
    native/              compiled code for this machine
    signature            of the manifest, with a key that never leaves the user's cache folder
    selftest.json, .safetensors   inputs and the outputs they must give
    report.html

Nothing here is pickled. Native code is loaded only when the signature is this user's own, or when the caller says
`trust`; otherwise, and on another machine or torch version, the graphs are compiled afresh.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchwright.errors import ArtifactError
from torchwright.facts import RECIPE_FORMAT, Fingerprint, Recipe, to_json
from torchwright.paths import cache_folder, file_digest
from torchwright.process import folders, interrupts

RECIPE, MANIFEST, REPORT, NATIVE, MODEL = "recipe.json", "manifest.json", "report.html", "native", "model"
GRAPH_CACHE, MACHINE_CODE = "cache.bin", "code.zip"
"""What torch.compile compiled, in NATIVE."""
SIGNATURE = "signature"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """How to run an artifact."""

    format: int = RECIPE_FORMAT
    engine: str
    dtype: str
    threads: int | None = None
    cases: tuple[str, ...] = ()
    """Names of the calls, in the order of the packages."""
    signatures: dict[str, str] = field(default_factory=dict)
    self_contained: bool = True
    files: dict[str, str] = field(default_factory=dict)
    """Relative path → SHA-256 in hexadecimal; everything but this file and the signature."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its place when the block ends well, and vanishes when it does not.

    An artifact that was there is replaced; anything else that was there is left alone. What processes that were killed
    in the middle left beside `path` is removed, and an artifact that one of them had moved aside is put back.

    Raises `ArtifactError` when `path` exists and is no artifact.
    """
    path = path.absolute()
    if path.exists() and not (path.is_dir() and ((path / RECIPE).is_file() or not any(path.iterdir()))):
        raise ArtifactError(
            f"{path} exists and is not an artifact",
            next="choose another folder with -o, or remove it yourself",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished, replaced = f".{path.name}.unfinished-", f".{path.name}.replaced-"
    folders.sweep(path.parent, unfinished)
    for left in folders.dead(path.parent, replaced):
        if not path.exists() and (left / path.name).is_dir():
            os.replace(left / path.name, path)
        shutil.rmtree(left, ignore_errors=True)
    temporary = folders.make(path.parent, unfinished)
    try:
        yield temporary.path
        interrupts.check()
        temporary.path.chmod(0o755)
        if path.exists():
            old = folders.make(path.parent, replaced)
            os.replace(path, old.path / path.name)
            os.replace(temporary.path, path)
            old.remove()
        else:
            os.replace(temporary.path, path)
    finally:
        temporary.remove()


def finish(folder: Path, recipe: Recipe, manifest: dict[str, Any]) -> None:
    """Write the recipe, and the manifest with the checksums of everything else, and sign the manifest."""
    (folder / RECIPE).write_text(to_json(recipe))
    for name in _names(folder):  # safetensors writes files that nobody else may read
        (folder / name).chmod((folder / RECIPE).stat().st_mode)
    files = {name: file_digest(folder / name) for name in _names(folder)}
    (folder / MANIFEST).write_text(json.dumps(asdict(Manifest(**manifest, files=files)), indent=2) + "\n")
    (folder / SIGNATURE).write_text(sign(folder / MANIFEST))


def open_artifact(path: Path) -> tuple[Recipe, Manifest]:
    """The recipe and manifest of an artifact whose every file is whole.

    Raises `ArtifactError` for a folder that is missing or no artifact, a file that is missing, added or changed, a
    newer format, or a recipe that is not one.
    """
    with checked_meanwhile(path) as (recipe, manifest, _):
        return recipe, manifest


@contextmanager
def checked_meanwhile(path: Path) -> Iterator[tuple[Recipe, Manifest, Callable[[], None]]]:
    """The recipe and manifest, while a thread compares the files' checksums; leaving waits for it.

    Calling the third waits at once, and must come before anything of the files is run. Raises as `open_artifact` does,
    a file that has changed there or on leaving.
    """
    recipe, manifest = _read(path)
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
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    if not path.is_dir():
        raise ArtifactError(
            f"there is no artifact at {path}", next="`torchwright optimize -o DIR` writes one"
        )
    for name in (RECIPE, MANIFEST):
        if not (path / name).is_file():
            raise ArtifactError(f"{path} is not an artifact", found=f"no {name}", next="optimize again")
    strict = ConfigDict(extra="forbid")
    try:
        raw = {name: json.loads((path / name).read_text()) for name in (RECIPE, MANIFEST)}
        for name, data in raw.items():
            version = data.get("format") if isinstance(data, dict) else None
            if isinstance(version, int) and version > RECIPE_FORMAT:
                raise ArtifactError(
                    f"{path / name} was written by a newer Torchwright",
                    found=f"format {version}",
                    allowed=f"up to {RECIPE_FORMAT}",
                    next="`pip install -U torchwright`",
                )
        recipe = TypeAdapter(_forbidding(Recipe, strict)).validate_python(raw[RECIPE])
        manifest = TypeAdapter(_forbidding(Manifest, strict)).validate_python(raw[MANIFEST])
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} is damaged", found=str(error), next="optimize again") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ArtifactError(
            f"{path} is damaged", found=f"{where}: {first['msg']}", next="optimize again"
        ) from error
    return recipe, manifest


def is_own(path: Path) -> bool:
    """Whether this user made the artifact on this machine, to the last byte (its files are checked already)."""
    signature = path / SIGNATURE
    return signature.is_file() and hmac.compare_digest(signature.read_text(), sign(path / MANIFEST))


def same_machine(recipe: Fingerprint, here: Fingerprint) -> str | None:
    """What differs between two machines as far as compiled code is concerned, or None."""
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


def sign(path: Path) -> str:
    """HMAC of a file with this user's key."""
    return hmac.new(_key(), path.read_bytes(), hashlib.sha256).hexdigest()


def _key() -> bytes:
    path = cache_folder() / "signing.key"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.touch(mode=0o600)
        temporary.write_bytes(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
    return path.read_bytes()


def _names(folder: Path) -> list[str]:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return [name for name in names if name not in (MANIFEST, SIGNATURE)]


def _check_names(path: Path, manifest: Manifest) -> None:
    present, listed = set(_names(path)), set(manifest.files)
    for name in sorted(listed - present):
        raise ArtifactError(
            f"{path} is damaged", found=f"{name} is missing", next="optimize again, or restore the file"
        )
    for name in sorted(present - listed):
        raise ArtifactError(
            f"{path} is damaged", found=f"{name} does not belong to it", next=f"remove {name}"
        )


def _check_contents(path: Path, manifest: Manifest) -> None:
    for name, expected in manifest.files.items():
        if file_digest(path / name) != expected:
            raise ArtifactError(
                f"{path} is damaged", found=f"{name} has changed since it was written", next="optimize again"
            )


def _forbidding(cls: type, config: Any) -> Any:
    from pydantic import with_config

    return with_config(config)(cls)


def _short(value: Any) -> str:
    return str(value) if not isinstance(value, list) else f"{len(value)} features"
