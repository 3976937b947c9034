"""Times as people write them: 90s, 2m, 1h, or a number of seconds."""

from __future__ import annotations

import math
import re

from torchwright.core.errors import WorkloadError


def seconds(text: str | float) -> float:
    """The seconds of a time such as `"90s"`, `"2m"`, `"1.5h"`, `"2m30s"`, `"120"` or `120`.

    Raises `WorkloadError` for anything but a positive, finite time.
    """
    found = _parsed(text) if isinstance(text, str) else float(text)
    if found is None:
        raise WorkloadError(f"'{text}' is no time", allowed="90s, 2m, 1h, 1m30s, or a number of seconds")
    if not 0 < found < math.inf:
        raise WorkloadError(
            f"{text} is not in the range of times", allowed="a time above 0 seconds, and one that ends"
        )
    return found


def written(count: float) -> str:
    """Return a time as people write it: 45s, 3m20s, 1h02m."""
    whole = round(count)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


def _parsed(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        parts = re.fullmatch(
            r"(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s)?", text.strip().lower().replace(" ", "")
        )
    if parts is None or not any(parts.groups()):
        return None
    try:
        return sum(
            float(part) * unit for part, unit in zip(parts.groups("0"), (3600.0, 60.0, 1.0), strict=True)
        )
    except ValueError:  # two points in one number
        return None
