"""The rows of a batch do not influence each other: one is disturbed, and the others must answer as before.

A row of NaN answers NaN wherever the original does, never a plausible number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchwright.core import nested
from torchwright.workloads.base import changed_tensors

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
    *,
    keeps_nan: bool = True,
) -> None:
    """Assert that a disturbed row keeps its own NaN, and that the undisturbed rows are as the original gives them.

    `tolerance` is the relative error of all undisturbed rows together, by the Frobenius norm; a technique that loses
    more of them without a disturbance may lose that and a `tolerance`th more. Without `keeps_nan` a row
    of NaN may be answered with numbers: files for other runtimes have integers for which nobody checks the inputs.
    """
    rows = len(tensors[batched[0]])
    assert rows > DISTURBED
    undisturbed = [_loss(*pair) for pair in _answers(expected, found, tensors, rows)]
    for name, factor in FACTORS.items():
        answers = _answers(expected, found, disturb(tensors, batched, factor), rows)
        for (whole, answered), before in zip(answers, undisturbed, strict=True):
            plausible = whole[DISTURBED].isnan() & ~answered[DISTURBED].isnan()
            lost = keeps_nan and bool(plausible.any())
            assert not lost, f"a row that is {name}: the original gives NaN, and this a number"
            error = _loss(whole, answered)
            limit = max(tolerance * float(_others(whole).double().norm()), (1 + tolerance) * before)
            assert error <= limit, (
                f"a row that is {name}: the other rows are off by {error:.3g} > {limit:.3g}"
            )


def _answers(
    expected: Callable[[Sequence[torch.Tensor]], Any],
    found: Callable[[Sequence[torch.Tensor]], Any],
    given: Sequence[torch.Tensor],
    rows: int,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The original's results and the candidate's, those with a row for each of the batch.

    A candidate that changes the inputs of a model that leaves them as they are fails.
    """
    own, others = ([tensor.clone() for tensor in given] for _ in range(2))
    results = list(zip(_batched(expected(own), rows), _batched(found(others), rows), strict=True))
    assert changed_tensors(own, others) == {}, "the inputs are other numbers after the call"
    return results


def _loss(whole: torch.Tensor, answered: torch.Tensor) -> float:
    """Return the error of the undisturbed rows, by the Frobenius norm."""
    return float((_others(answered).double() - _others(whole).double()).norm())


def _others(result: torch.Tensor) -> torch.Tensor:
    """The result without the disturbed row."""
    return torch.cat([result[:DISTURBED], result[DISTURBED + 1 :]])


def _batched(answer: Any, rows: int) -> list[torch.Tensor]:
    """The results that have the batch's rows."""
    leaves = nested.tensors(answer)
    batched = [leaf for leaf in leaves if leaf.dim() and len(leaf) == rows]
    assert batched, "no result has the rows of the batch"
    return batched
