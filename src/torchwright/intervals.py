"""95% intervals of few values: what the tails of Student's t and of a share are, without a library for it."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95


def mean_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Student's interval of the mean; exact for normal values, of which two are enough.

    Raises `ValueError` for fewer than two values, of which no spread is known.
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"{n} values have no interval")
    mean = math.fsum(values) / n
    half = _student_t(n - 1) * statistics.stdev(values, mean) / math.sqrt(n)
    return mean - half, mean + half


def share_bounds(count: int, n: int) -> tuple[float, float]:
    """Clopper and Pearson's interval of a share that was seen `count` times in `n`: never covers less than it says.

    Shares come in steps, so with few values it covers more.
    """
    tail = (1 - CONFIDENCE) / 2
    low = _beta_quantile(tail, count, n - count + 1) if count else 0.0
    high = _beta_quantile(1 - tail, count + 1, n - count) if count < n else 1.0
    return low, high


def _student_t(degrees: int) -> float:
    """What |t| stays under in 95%: degrees / (degrees + t²) is distributed as Beta(degrees / 2, 1/2)."""
    x = _beta_quantile(1 - CONFIDENCE, degrees / 2, 0.5)
    return math.sqrt(degrees * (1 - x) / x)


def _beta_quantile(probability: float, a: float, b: float) -> float:
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _beta_share(middle, a, b) < probability else (low, middle)
    return middle


def _beta_share(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function, by its continued fraction (Abramowitz and Stegun 26.5.8; Lentz)."""
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_share(1 - x, b, a)
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    fraction, c, d = 1.0, 1.0, 0.0
    for step in itertools.count(1):
        m = step // 2
        if step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + step - 1) * (a + step))
        else:
            term = m * (b - m) * x / ((a + step - 1) * (a + step))
        d = 1 / (1 + term * d)
        c = 1 + term / c
        fraction *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return math.exp(logarithm) / (a * fraction)
