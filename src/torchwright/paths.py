"""Where things live outside the package."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where this user's measured and compiled things live: `$TORCHWRIGHT_CACHE`, else the desktop standard's place."""
    chosen = os.environ.get("TORCHWRIGHT_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchwright"
