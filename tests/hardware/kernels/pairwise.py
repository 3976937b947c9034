"""Of a grid of parameters, the few cases in which each two values still meet; the rest is for the nightly run.

A fault of a kernel hides in one value (a width that no vector divides) or in two together (that width on one
instruction set): a set of cases in which all pairs occur finds it in a tenth of the time (D. Cohen et al., "The AETG
system: an approach to testing based on combinatorial design", 1997).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two axes, each with its value."""


def pairs(case: Mapping[str, str]) -> set[Pair]:
    """The pairs of values that meet in a case (axis → its value); one axis alone is paired with itself."""
    values = sorted(case.items())
    return set(itertools.combinations(values, 2)) or {(value, value) for value in values}


def cover(cases: Sequence[Mapping[str, str]]) -> set[int]:
    """Places of cases that have every pair of all of them, chosen greedily: always the first that adds the most."""
    held = [pairs(case) for case in cases]
    missing = set[Pair]().union(*held)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda place: len(held[place] & missing))
        chosen.add(best)
        missing -= held[best]
    return chosen
