"""Draw a token by a race of all tokens, so that a draft with similar probabilities often draws the same one.

Every token has a random time, exponential with the token's probability as its rate, and the first one is drawn. It is
distributed by the probabilities, as with the Gumbel-max trick. The times depend on a key alone. Two models with the
same key draw the same token with a probability of at least (1 - d) / (1 + d). Here d is the total variation distance
of their probabilities. A draft that always proposes its likeliest token is right as often as the target draws that
token, however close the two are.

Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", 2025.
"""

from __future__ import annotations

import numpy as np

RACED = 2.0**-10
"""Tokens below this share of the largest weight race as one, so that few of a vocabulary need a time."""
BLOCK = 256
"""Weights that are added in float32."""
REST = 2**63
"""Number of that one competitor; no vocabulary has so many tokens."""
STEP = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""The constants of SplitMix64 (Steele, Lea and Flood, 2014), which makes of counters what looks like noise."""


def winner(weight_K: np.ndarray, tokens_K: np.ndarray | None, key: int) -> int:
    """Return the place of the token that is drawn.

    `weight_K` are probabilities up to a factor, float32 and at least one of them positive, of the tokens `tokens_K`
    (None: their places). `key` is a whole number below 2^64.
    """
    places = (weight_K >= RACED * weight_K.max()).nonzero()[0]
    racing = weight_K[places].astype(np.float64)
    times = _exponentials(places if tokens_K is None else tokens_K[places], key) / racing
    first = int(times.argmin())
    rest = _sum(weight_K) - racing.sum()
    if rest > 0 and _exponentials(np.array([REST], np.uint64), key)[0] / rest < times[first]:
        others = weight_K.copy()
        others[places] = 0
        if others.any():  # or the difference of the sums was rounding
            return _among(others, key)
    return int(places[first])


def speeds(weight_K: np.ndarray, tokens_K: np.ndarray, key: int) -> np.ndarray:
    """Return 1 / time (K,) of tokens with the given weights in the race that `key` decides: the largest one wins."""
    return weight_K / _exponentials(tokens_K, key)


def _sum(weight_K: np.ndarray) -> float:
    """Add float32 in blocks, which is as exact as in float64 for this purpose and takes a third of the time."""
    whole = len(weight_K) - len(weight_K) % BLOCK
    return float(weight_K[:whole].reshape(-1, BLOCK).sum(1).sum(dtype=np.float64) + weight_K[whole:].sum())


def _among(weight_K: np.ndarray, key: int) -> int:
    """Draw one of the tokens that raced as one, by the inverse of their distribution."""
    uniform = _uniforms(np.array([REST + 1], np.uint64), key)[0]
    before = weight_K.cumsum(dtype=np.float64)
    place = int(before.searchsorted(uniform * before[-1], side="right"))
    return min(place, int(weight_K.nonzero()[0][-1]))  # rounding may leave a draw at the very end


def _exponentials(numbers: np.ndarray, key: int) -> np.ndarray:
    return -np.log(_uniforms(numbers, key))


def _uniforms(numbers: np.ndarray, key: int) -> np.ndarray:
    """Return one float64 in (0, 1) for each number."""
    with np.errstate(over="ignore"):  # products are modulo 2^64
        bits = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(STEP) + np.uint64(key)
        for shift, factor in MIX:
            bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
        bits ^= bits >> np.uint64(31)
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
