"""docs/security.md: each claim names tests that exist, or says that it is not tested."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "security.md"
ROW = re.compile(r"^\| (?!---)(.+) \|$", re.MULTILINE)
NOT_TESTED = "not tested"


def rows() -> list[list[str]]:
    """Return the cells of each row of a claim."""
    cells = [row[1].split(" | ") for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))]
    return [row for row in cells if row[-1] != "shown by"]


def test_every_claim_is_shown_by_a_test_or_says_that_it_is_not() -> None:
    texts = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    known = set(re.findall(r"^def (test_\w+)", texts, re.MULTILINE))
    claims = rows()
    assert len(claims) > 30
    for claim in claims:
        assert len(claim) == 4, claim
        names = re.findall(r"`(\w+)`", claim[3])
        assert names or claim[3] == NOT_TESTED, claim
        assert known.issuperset(names), (set(names) - known, claim)


def test_no_claim_is_without_a_test() -> None:
    assert [claim[0] for claim in rows() if claim[3] == NOT_TESTED] == []
