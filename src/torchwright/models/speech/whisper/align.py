"""When each token was said, by where the decoder looks while it writes: dynamic time warping over cross-attention.

The method, its heads, its median filter and its ties are openai/whisper's (timing.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from torchwright.hub.fields import Fields
from torchwright.hub.folder import find_object
from torchwright.models.speech.steps import Head

FILTER = 7
"""Frames over which the attention's median is taken."""


def read_heads(folder: Path, layers: int, heads: int) -> list[Head]:
    """Return the alignment heads that the folder names; by default those of the upper half of the layers.

    Raises `ModelError` for an invalid list.
    """
    fields = Fields(folder / "generation_config.json", find_object(folder / "generation_config.json"))
    named = fields.data.get("alignment_heads")
    if named is None:
        return [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]
    allowed = [[layer, head] for layer in range(layers) for head in range(heads)]
    if not isinstance(named, list) or not named or not all(pair in allowed for pair in named):
        raise fields.wrong("alignment_heads", f"pairs of one of {layers} layers and one of {heads} heads")
    return [(layer, head) for layer, head in named]


def smooth(looks_HTS: torch.Tensor) -> np.ndarray:
    """One number for each token and state (T, S), the larger the more likely it was said there."""
    weights_HTS = looks_HTS.softmax(-1)
    std_H1S, mean_H1S = torch.std_mean(weights_HTS, dim=-2, keepdim=True, unbiased=False)
    weights_HTS = median((weights_HTS - mean_H1S) / std_H1S.clamp(min=torch.finfo(torch.float32).tiny))
    return weights_HTS.mean(0).double().numpy()


def median(values: torch.Tensor) -> torch.Tensor:
    """The median of `FILTER` neighbours along the last of three axes, whose ends are mirrored."""
    half = FILTER // 2
    if values.shape[-1] <= half:
        return values
    padded = torch.nn.functional.pad(values, (half, half), mode="reflect")
    return padded.unfold(-1, FILTER, 1).sort(-1).values[..., half]


def starts(gain_TS: np.ndarray) -> np.ndarray:
    """Return each row's start (T,) on the best path from corner to corner, with steps right, down or both.

    Float64. A tie goes to the right.
    """
    T, S = gain_TS.shape
    best = np.full((T + 1, S + 1), np.inf)
    best[0, 0] = 0
    come = np.full((T + 1, S + 1), 2, np.int8)
    come[1:, 0] = 1
    for diagonal in range(2, T + S + 1):  # no cell of one needs another
        i = np.arange(max(1, diagonal - S), min(T, diagonal - 1) + 1)
        j = diagonal - i
        both, down, right = best[i - 1, j - 1], best[i - 1, j], best[i, j - 1]
        come[i, j] = np.where(
            (both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2)
        )
        best[i, j] = np.choose(come[i, j], (both, down, right)) - gain_TS[i - 1, j - 1]
    found, i, j = np.zeros(T, np.int64), T, S
    while i > 0:
        found[i - 1] = max(0, j - 1)
        i, j = i - (come[i, j] != 2), j - (come[i, j] != 1)
    return found
