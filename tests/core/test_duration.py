"""Times as people write them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from torchwright.core.duration import seconds
from torchwright.core.errors import WorkloadError


@pytest.mark.parametrize(
    ("given", "found"),
    [("90s", 90), ("2m", 120), ("1h", 3600), ("1.5h", 5400), ("2m30s", 150), (" 1H 5 m ", 3900), ("45", 45),
     ("0.5", 0.5), (45, 45), (0.25, 0.25)],
)  # fmt: skip
def test_a_time_is_read(given: Any, found: float):
    assert seconds(given) == found


@pytest.mark.parametrize("given", ["", "soon", "2 days", "m", "1.2.3s", "30s2m", "-2m"])
def test_what_is_no_time_is_refused_by_name(given: str):
    with pytest.raises(WorkloadError, match="is no time"):
        seconds(given)


@pytest.mark.parametrize("given", ["0", "0s", 0, -1, "-1", "inf", math.inf, math.nan, "nan"])
def test_a_time_is_more_than_nothing_and_ends(given: Any):
    with pytest.raises(WorkloadError, match="not in the range"):
        seconds(given)
