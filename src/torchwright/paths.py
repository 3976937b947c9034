"""Where things live outside the package, and whether they are what they were."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from torchwright.system import caches_home


def cache_folder() -> Path:
    """Where this user's measured and compiled things live: `$TORCHWRIGHT_CACHE`, else the system's place for caches."""
    chosen = os.environ.get("TORCHWRIGHT_CACHE")
    if chosen:
        return Path(chosen)
    return caches_home() / "torchwright"


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
