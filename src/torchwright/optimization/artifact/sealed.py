"""A folder's files with their checksums in one of them, and that one signed with this user's key."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from pathlib import Path

from torchwright.core.json_file import read_bytes
from torchwright.core.paths import file_digest
from torchwright.optimization.artifact.folder import SIGNATURE, sign

UNFINISHED = ".unfinished"
"""In a folder that is being written (`artifact.folder.writing`)."""


def digests(manifest: Path) -> dict[str, str]:
    """Return relative path → SHA-256 of every file except the manifest and its signature; the manifest may not exist
    yet.
    """
    folder = manifest.parent
    return {name: file_digest(folder / name) for name in sorted(_listed(manifest)) if name != UNFINISHED}


def seal(manifest: Path) -> None:
    """Sign the file that lists the others; where no key can be kept the folder is nobody's own."""
    if (signed := sign(manifest)) is not None:
        (manifest.parent / SIGNATURE).write_text(signed, encoding="utf-8")


def is_own(manifest: Path) -> bool:
    """Check whether this user signed it on this machine; the files that it lists are not checked."""
    expected, signature = sign(manifest), manifest.parent / SIGNATURE
    if expected is None or not signature.is_file():
        return False
    return hmac.compare_digest(read_bytes(signature, 1000).strip(), expected.encode())


def not_as_written(manifest: Path, files: Mapping[str, str]) -> list[str]:
    """Files that have changed, are missing or were added, but for the manifest and its signature."""
    folder = manifest.parent
    present = _listed(manifest)
    changed = sorted(
        name for name, digest in files.items() if name not in present or file_digest(folder / name) != digest
    )
    return [*changed, *sorted(present - set(files))]


def _listed(manifest: Path) -> set[str]:
    folder = manifest.parent
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return names - {manifest.name, SIGNATURE}
