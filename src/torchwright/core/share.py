"""Shares as people write them: 0.05 or 5%."""

from __future__ import annotations

import math

from torchwright.core.errors import WorkloadError, shown

ALLOWED = "0.05 or 5%: zero or more, and finite"


def share(value: str | float, what: str) -> float:
    """Return the share that a number, `"0.05"` or `"5%"` says. `what` names the option in errors.

    Raises `WorkloadError` for anything else, and for a share that is negative or not finite.
    """
    found = _parsed(value)
    if found is None or not 0 <= found < math.inf:
        raise WorkloadError(f"{what} = {shown(value, 80)} is not a share", allowed=ALLOWED)
    return found


def _parsed(value: str | float) -> float | None:
    if not isinstance(value, str):
        return None if isinstance(value, bool) else _number(value)
    number = _number(value.strip().removesuffix("%"))
    return number / 100 if number is not None and value.strip().endswith("%") else number


def _number(value: str | float) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
