"""The operator scorecard as one self-contained HTML page: no script, nothing loaded from anywhere."""

from __future__ import annotations

from typing import Any

from torchwright.report.html import environment

MOST_LISTED = 2000
"""Rows of faults: a device without most operators has thousands, which a browser still shows at once."""
FAMILIES = {
    "forward": "results of operators",
    "gradient": "gradients of operators",
    "modules": "layers",
    "optimizers": "optimizer steps",
}


def render(card: dict[str, Any], shares: list[tuple[str, int, int]]) -> str:
    """Return the page of a scorecard, given as plain data, with passed and all samples of each family."""
    return (
        environment()
        .get_template("operators.html.j2")
        .render(
            card=card,
            rows=[
                (FAMILIES[family], passed, total, percent(passed, total)) for family, passed, total in shares
            ],
            faults=card["faults"][:MOST_LISTED],
            cut=max(0, len(card["faults"]) - MOST_LISTED),
            families=FAMILIES,
        )
    )


def percent(passed: int, total: int) -> str:
    """Return a share in words; only all of them are 100%."""
    if not total:
        return "no samples"
    return "100%" if passed == total else f"{min(99.99, 100 * passed / total):.2f}%"
