"""95% intervals of few values: tails of Student's t, of a share and of a root mean square, without a library for it."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence

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


@functools.cache
def rms_bounds(n: int) -> tuple[float, float]:
    """Return the factors from the root mean square of `n` values to the ends of its interval; exact for normal
    values.

    Their sum of squares is distributed as chi-square with `n` degrees: 0.60 and 2.87 of 4, 0.96 and 1.05 of 1,000.
    """
    tail = (1 - CONFIDENCE) / 2
    return math.sqrt(n / _chi_square_quantile(1 - tail, n)), math.sqrt(n / _chi_square_quantile(tail, n))


@functools.cache
def _student_t(degrees: int) -> float:
    """Return the bound of |t| at 95%: degrees / (degrees + t²) is distributed as Beta(degrees / 2, 1/2)."""
    x = _beta_quantile(1 - CONFIDENCE, degrees / 2, 0.5)
    return math.sqrt(degrees * (1 - x) / x)


def _chi_square_quantile(probability: float, degrees: int) -> float:
    import torch  # not at the top: the other intervals need no torch

    half = torch.tensor(degrees / 2, dtype=torch.float64)

    def share(x: float) -> float:
        return torch.special.gammainc(half, torch.tensor(x / 2, dtype=torch.float64)).item()

    return _quantile(probability, share, 4.0 * degrees + 40)


def _beta_quantile(probability: float, a: float, b: float) -> float:
    return _quantile(probability, lambda x: _beta_share(x, a, b), 1.0)


def _quantile(probability: float, share: Callable[[float], float], most: float) -> float:
    """Return where a share that rises between 0 and `most` reaches `probability`, by bisection to the last bit."""
    low, high = 0.0, most
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if share(middle) < probability else (low, middle)
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
