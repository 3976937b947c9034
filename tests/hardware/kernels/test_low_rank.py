"""Low-rank additions: the compiled kernels against the reference, the same bits in any company, wrong arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchwright.hardware.kernels import reference
from torchwright.hardware.kernels.pack_low_rank import Segment, pack_low_rank

Matrices = tuple[torch.Tensor, torch.Tensor, list[Segment]]
SHAPES = [(1, 1, 2), (16, 64, 2), (37, 17, 6), (64, 130, 16), (100, 33, 40)]
"""Output features, input features and ranks."""


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def matrices(N: int, K: int, R: int, seed: int = 0) -> Matrices:
    return randn(R, K, seed=seed) / K**0.5, randn(N, R, seed=seed + 1), [(N, 0, R)]


def fused(seed: int = 0) -> Matrices:
    """Three matrices one below the other, of which the second has no adapter."""
    (a, b, _), (c, d, _) = matrices(32, 48, 6, seed), matrices(19, 48, 4, seed + 2)
    return torch.cat([a, c]), torch.block_diag(b, torch.zeros(16, 0), d), [(32, 0, 6), (48, 6, 0), (67, 6, 4)]


def adapter(places: dict[int, Matrices]) -> Any:
    made: Any = torch.classes.torchwright.Adapter()
    for place, (a, b, segments) in places.items():
        made.add(
            place, *pack_low_rank(a, b, segments)[:2], a.shape[1], len(b), pack_low_rank(a, b, segments)[2]
        )
    return made


def rows_of(adapters: list[Any], rows: list[list[int]]) -> Any:
    return torch.classes.torchwright.AdaptedRows(adapters, [torch.tensor(some) for some in rows])


@pytest.mark.parametrize("found", [*(matrices(*shape) for shape in SHAPES), fused()])
def test_against_the_reference(isa: str, found: Matrices) -> None:
    a, b, _ = found
    for count in (1, 2, 5, 17, 40):
        x, y = randn(count + 2, a.shape[1], seed=count), randn(count + 2, len(b), seed=count + 1)
        rows = torch.randperm(count + 2, generator=torch.Generator().manual_seed(count))[:count]
        wanted, out = y.clone(), y.clone()
        reference.add_low_rank(wanted, x, rows, a, b)
        rows_of([adapter({3: found})], [rows.tolist()]).add(3, out, x)
        torch.testing.assert_close(out.float(), wanted.float(), atol=2**-5, rtol=2**-6)
        untouched = torch.ones(count + 2, dtype=torch.bool)
        untouched[rows] = False
        assert torch.equal(out[untouched], y[untouched])


def test_rows_do_not_depend_on_each_other(isa: str) -> None:
    """To the bit: a row alone, in any number of rows, and beside other adapters."""
    places = [{0: fused(seed)} for seed in range(0, 70, 10)]
    adapters = [adapter(place) for place in places]
    x, y = randn(90, 48, seed=5), randn(90, 67, seed=6)
    owner = [row % 7 for row in range(90)]
    whole = y.clone()
    rows_of(adapters, [[row for row in range(90) if owner[row] == one] for one in range(7)]).add(0, whole, x)
    for row in range(90):
        alone = y[row : row + 1].clone()
        rows_of([adapters[owner[row]]], [[0]]).add(0, alone, x[row : row + 1])
        assert torch.equal(alone[0], whole[row]), f"row {row}"
    for count in (2, 3, 4, 5, 8, 33):
        some = y[:count].clone()
        rows_of(adapters[:1], [[*range(count)]]).add(0, some, x[:count])
        again = y[:count].clone()
        for row in range(count):
            rows_of(adapters[:1], [[row]]).add(0, again, x[:count])
        assert torch.equal(some, again), f"{count} rows"


def test_adapters_without_a_place_change_nothing(isa: str) -> None:
    one, other = adapter({1: matrices(16, 8, 2)}), adapter({5: matrices(16, 8, 2, seed=9)})
    x, y = randn(2, 8), randn(2, 16)
    for place, changed in ((0, []), (1, [0]), (5, [1]), (9, [])):
        out = y.clone()
        rows_of([one, other], [[0], [1]]).add(place, out, x)
        assert [row for row in range(2) if not torch.equal(out[row], y[row])] == changed


def test_wrong_arguments_are_refused(isa: str) -> None:
    a, b, segments = matrices(16, 8, 2)
    packed = pack_low_rank(a, b, segments)
    made: Any = torch.classes.torchwright.Adapter()
    for wrong in (
        (-1, *packed[:2], 8, 16, packed[2]),
        (0, packed[0].float(), packed[1], 8, 16, packed[2]),
        (0, *packed[:2], 10, 16, packed[2]),
        (0, *packed[:2], 8, 17, packed[2]),
        (0, *packed[:2], 8, 16, [1, 0, 9]),
        (0, *packed[:2], 8, 16, [1, 16, 1]),
        (0, *packed[:2], 8, 16, [1, 0]),
        (0, packed[0], packed[1][2:], 8, 16, packed[2]),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            made.add(*wrong)
    good = adapter({0: (a, b, segments)})
    x, y = randn(2, 8), randn(2, 16)
    for rows, out, given in (([2], y, x), ([0], y[:1], x), ([0], y.float(), x), ([0], y, randn(2, 9))):
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            rows_of([good], [rows]).add(0, out, given)
    with pytest.raises((IndexError, RuntimeError)):
        rows_of([good], [[-1]])
