"""Values that stand for the whole domain of a dtype: where torch and NumPy may part."""

from __future__ import annotations

import numpy as np

FLOATS = (
    *(0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.3, 7.0, 8.0, 10.0, 64.5, 88.0, 100.7, 1000.0, 65504.0),
    *(2.0**24 + 1, 2.0**31, 2.0**53, 2.0**63, 1e18, 1e300, 1e-3, 1e-10, 1e-30, 1e-310),
)
"""Halves, whole numbers, both sides of each limit of an integer or a float, subnormal numbers."""
INTEGERS = (*range(9), 10, 15, 16, 31, 32, 33, 63, 64, 65, 100, 127, 200, 2**24 + 1, 2**31 - 1, 2**53 + 1)
"""Each shift count around a width, and numbers that a narrower integer or a float cannot hold."""
PARTS = (0.0, 1.0, 0.5, 3.3, 1e-3, 1e30)
"""Real and imaginary parts of complex numbers."""


def values(dtype: str) -> np.ndarray:
    """Return the probe values of ``dtype``: signs, halves, large, subnormal, NaN, infinity, integer extremes."""
    kind = np.dtype(dtype).kind
    if kind == "b":
        return np.array([False, True])
    if kind in "iu":
        limits = np.iinfo(dtype)
        whole = [number for number in INTEGERS if number <= limits.max]
        whole += [-number for number in whole if -number >= limits.min]
        return np.unique(np.array([*whole, limits.min, limits.min + 1, limits.max, limits.max - 1], dtype))
    if kind == "c":
        parts = _floats(PARTS, np.dtype(dtype).char.lower())
        found = np.empty((len(parts), len(parts)), dtype)
        found.real, found.imag = parts[:, None], parts[None, :]  # a product with 1j would spread NaN
        return found.ravel()
    limits = np.finfo(dtype)
    found = _floats(FLOATS, dtype)
    extremes = [limits.max, limits.tiny, limits.smallest_subnormal]
    return np.concatenate([found, np.array([*extremes, *(-value for value in extremes)], dtype)])


def _floats(magnitudes: tuple[float, ...], dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        positive = np.array(magnitudes).astype(dtype)
    return np.concatenate([positive, -positive, np.array([np.inf, -np.inf, np.nan], dtype)])


def crossed(dtypes: tuple[str, ...]) -> list[np.ndarray]:
    """Return one array per dtype that together hold every combination of their probe values."""
    several = [values(dtype) for dtype in dtypes]
    if len(several) > 2:  # a few of each are enough for bounds, and all combinations would be too many
        several = [several[0], *(one[:: max(1, len(one) // 12)] for one in several[1:])]
    return [np.ascontiguousarray(grid.ravel()) for grid in np.meshgrid(*several, indexing="ij")]


def rows(dtype: str) -> np.ndarray:
    """Return rows for reductions and sorts: plain ones, ties, and each kind of special value among plain ones."""
    special = values(dtype)
    plain = np.array([3, 1, 2, 2, 0, 3, 1, 5]).astype(dtype)
    found = [plain, plain[::-1], np.zeros_like(plain), np.ones_like(plain), special[: len(plain)]]
    for value in _specials(special):
        row = plain.copy()
        row[2] = value
        found.append(row)
        row = row.copy()
        row[5] = special[-1]  # NaN, or the largest integer
        found.append(row)
    return np.stack([np.resize(row, len(plain)) for row in found])


def _specials(special: np.ndarray) -> np.ndarray:
    if special.dtype.kind in "fc":
        with np.errstate(all="ignore"):
            moderate = np.isfinite(special) & (np.abs(special) < 1e3) | ~np.isfinite(special)
        return special[moderate]  # sums of numbers beyond these depend on their order
    return special
