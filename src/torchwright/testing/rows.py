"""The rows of a batch do not influence each other: one is disturbed, and the others must answer as before.

A row of NaN answers NaN wherever the original does, never a plausible number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchwright.core import nested

DISTURBED = 1
"""The row that is changed."""
FACTORS = {"10x": 10.0, "100x": 100.0, "NaN": math.nan}
"""Name → what the disturbed row is multiplied by. One scale per call loses 7% by a row 10 times as large."""


def disturb(tensors: Sequence[torch.Tensor], batched: Sequence[int], factor: float) -> list[torch.Tensor]:
    """Copy the tensors, with one row of those in `batched` multiplied by `factor`; rows of integers are reversed."""
    changed = [tensor.clone() for tensor in tensors]
    for i in batched:
        row = changed[i][DISTURBED]
        changed[i][DISTURBED] = row * factor if row.is_floating_point() else row.flip(-1)
    return changed


def check_rows(
    expected: Callable[[Sequence[torch.Tensor]], Any],
    found: Callable[[Sequence[torch.Tensor]], Any],
    tensors: Sequence[torch.Tensor],
    batched: Sequence[int],
    tolerance: float,
) -> None:
    """Assert that a disturbed row keeps its own NaN, and that the undisturbed rows are as the original gives them.

    `tolerance` is the relative error of all undisturbed rows together, by the Frobenius norm.
    """
    rows = len(tensors[batched[0]])
    assert rows > DISTURBED
    for name, factor in FACTORS.items():
        given = disturb(tensors, batched, factor)
        pairs = zip(_batched(expected(given), rows), _batched(found(given), rows), strict=True)
        for whole, answered in pairs:
            plausible = whole[DISTURBED].isnan() & ~answered[DISTURBED].isnan()
            assert not plausible.any(), f"a row that is {name}: the original gives NaN, and this a number"
            wanted, got = _others(whole), _others(answered)
            error = float((got.double() - wanted.double()).norm())
            limit = tolerance * float(wanted.double().norm())
            assert error <= limit, (
                f"a row that is {name}: the other rows are off by {error:.3g} > {limit:.3g}"
            )


def _others(result: torch.Tensor) -> torch.Tensor:
    """The result without the disturbed row."""
    return torch.cat([result[:DISTURBED], result[DISTURBED + 1 :]])


def _batched(answer: Any, rows: int) -> list[torch.Tensor]:
    """The results that have the batch's rows."""
    leaves = nested.tensors(answer)
    batched = [leaf for leaf in leaves if leaf.dim() and len(leaf) == rows]
    assert batched, "no result has the rows of the batch"
    return batched
