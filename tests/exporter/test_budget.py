"""Which precision a budget takes, and what is said where none fits."""

from __future__ import annotations

from typing import Any

import pytest

from torchwright.cli import main
from torchwright.core.errors import RefusedTechnique
from torchwright.exporter.budget import Budget


def report(size: int, memory: int, error: float | None, verdict: str = "holds") -> dict[str, Any]:
    return {"size_bytes": size, "memory_bytes": memory, "largest_error": error, "verdict": verdict}


TRIED: dict[str, dict[str, Any] | str] = {
    "wide": report(400, 900, 0.001),
    "half": report(200, 950, 0.01),
    "small": report(100, 300, 0.05),
    "wrong": report(50, 100, 0.9, "differs"),
    "none": "the format has no such layer",
}


@pytest.mark.parametrize(
    ("size", "memory", "chosen"),
    [(400, None, "wide"), (399, None, "half"), (200, 950, "half"), (200, 900, "small"), (None, 900, "wide")],
)
def test_the_precision_of_least_error_that_fits(size: int | None, memory: int | None, chosen: str) -> None:
    assert Budget(size=size, memory=memory).choose(TRIED) == chosen


def test_where_none_fits_each_is_told_what_it_lacks() -> None:
    with pytest.raises(RefusedTechnique) as caught:
        Budget(size=60).choose(TRIED)
    said = str(caught.value)
    assert "small: 100 bytes large" in said
    assert "wrong: off by 0.9" in said
    assert "none: the format has no such layer" in said
    assert "60 bytes of the package" in said
    assert not Budget()


def test_a_bound_that_is_no_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--to", "pt2", "--max-size", "much", "--quiet"]) == 2
    assert "'much' is no size" in capsys.readouterr().err
