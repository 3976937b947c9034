"""The pictures of a user's folder: some to judge by, others to calibrate on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from torchwright.core.errors import WorkloadError
from torchwright.models.vision.picture import SUFFIXES, read_picture

FEWEST = 3
"""One to calibrate on, two to judge by."""


class UserPictures:
    """Return a folder's pictures by their extensions, sorted by name: the last fifth calibrates.

    Raises `WorkloadError` if it is not a folder, or holds too few.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise WorkloadError(f"images={folder} is no folder")
        self.folder = folder.resolve()
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
        if len(files) < FEWEST:
            raise WorkloadError(
                f"{folder} holds {len(files)} pictures",
                allowed=f"{FEWEST} or more, by their endings: {', '.join(SUFFIXES)}",
                next="leave --images out to be judged by made-up ones",
            )
        apart = len(files) // 5 or 1
        self.judged, self.calibration = files[:-apart], files[-apart:]

    def read(self, index: int, *, calibration: bool) -> np.ndarray:
        """RGB (H, W, 3) uint8; raises what `read_picture` raises."""
        return read_picture((self.calibration if calibration else self.judged)[index])
