"""A picture or video on its way to a model's vision encoder, as one process sends it to another. No torch here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # most processes that exchange messages have no picture
    import numpy as np

DTYPES = ("float32", "int64", "bool")
"""Types of a prepared picture's arrays: numbers that encoders read, sizes, and masks of padding."""
VIDEO = "pixel_values_videos"
"""The array that a video has and a picture has not."""


@dataclass(frozen=True, slots=True)
class PictureArray:
    """One array of a prepared picture."""

    dtype: str
    shape: tuple[int, ...]
    content: memoryview
    """A part of the message that brought the array, which is not copied."""

    def numpy(self) -> np.ndarray:
        """Return the array. Raises `ValueError` for another type than `DTYPES`, or a size that does not fit."""
        import numpy as np

        if self.dtype not in DTYPES:
            raise ValueError(f"an array of {self.dtype}")
        return np.frombuffer(self.content, self.dtype).reshape(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A prepared picture or video: the arrays that its model's processor returned."""

    digest: str
    """SHA-256 of the arrays: equal pictures have equal embeddings."""
    tokens: int
    """Places in the prompt that its embeddings take."""
    arrays: dict[str, PictureArray]
    """The vision encoder's arguments by name."""

    @property
    def moves(self) -> bool:
        """True for a video."""
        return VIDEO in self.arrays

    @property
    def bytes(self) -> int:
        return sum(len(array.content) for array in self.arrays.values())


def picture_of(arrays: Mapping[str, np.ndarray], tokens: int) -> Picture:
    """Return the picture of these arrays."""
    import numpy as np

    digest, packed = hashlib.sha256(), dict[str, PictureArray]()
    for name, array in sorted(arrays.items()):
        dtype = next((kind for kind in DTYPES if np.dtype(kind).kind == array.dtype.kind), None)
        if dtype is None:
            raise ValueError(f"{name} is an array of {array.dtype}")
        content = np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data
        packed[name] = PictureArray(dtype, array.shape, content)
        digest.update(f"{name} {dtype} {array.shape} ".encode())
        digest.update(content)
    return Picture(digest=digest.hexdigest(), tokens=tokens, arrays=packed)
