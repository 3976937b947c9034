"""The cases that are left of a grid."""

from __future__ import annotations

import itertools

from pairwise import cover, pairs


def test_every_pair_of_values_is_left_and_most_cases_are_not() -> None:
    sizes = {"isa": 7, "kind": 3, "heads": 7, "dtype": 2, "window": 3}
    grid = [
        dict(zip(sizes, map(str, places), strict=True))
        for places in itertools.product(*map(range, sizes.values()))
    ]
    chosen = cover(grid)
    assert set().union(*map(pairs, grid)) == set().union(*(pairs(grid[place]) for place in chosen))
    assert 49 <= len(chosen) < 80 < len(grid) == 882


def test_one_axis_keeps_every_value() -> None:
    assert cover([{"width": str(place)} for place in range(9)]) == set(range(9))
    assert cover([{}]) == set()
