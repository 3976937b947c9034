"""Attention with positions in rows and columns against float64, and against transformers' own layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

ERROR = {torch.float32: 3e-6, torch.bfloat16: 6e-3}
"""Relative (Frobenius): sums in another order; weights and outputs rounded to bfloat16."""
SHAPES = [
    (2, 3, 14, 14, 64),
    (1, 2, 5, 7, 16),
    (1, 1, 1, 1, 32),
    (2, 1, 3, 33, 48),
    (1, 2, 20, 16, 80),
    (1, 1, 40, 9, 96),
]
"""Batch, heads, rows, columns, head size."""


def exact(q: Any, k: Any, v: Any, rows: Any, columns: Any, Y: int, X: int, scale: float) -> torch.Tensor:
    """In float64, with the bias of every pair written down."""
    q, k, v, rows, columns = (x.double() for x in (q, k, v, rows, columns))
    y, x = torch.arange(Y * X) // X, torch.arange(Y * X) % X
    by_row = rows[y[:, None] - y[None] + Y - 1]
    by_column = columns[x[:, None] - x[None] + X - 1]
    bias = torch.einsum("bhtd,tsd->bhts", q, by_row + by_column)
    return (q @ k.transpose(-1, -2) * scale + bias).softmax(-1) @ v


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grid_attention(isa: str, native: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    B, H, Y, X, D = shape
    q = torch.randn(B, Y * X, H, D).to(dtype).transpose(1, 2)
    k = torch.randn(B, H, Y * X, 2 * D).to(dtype)[..., D:]
    v = torch.randn(B, H, D, Y * X).to(dtype).transpose(2, 3)
    rows, columns = torch.randn(2 * Y - 1, D) * D**-0.5, (torch.randn(2 * X - 1, D) * D**-0.5).to(dtype)
    got = native.grid_attention(q, k, v, rows, columns, D**-0.5)
    wanted = exact(q, k, v, rows, columns, Y, X, D**-0.5)
    assert got.shape == q.shape
    assert got.dtype == dtype
    assert got.transpose(1, 2).is_contiguous()
    assert float((got.double() - wanted).norm() / wanted.norm()) <= ERROR[dtype]


@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_a_query_gives_the_same_bits_on_any_number_of_threads(
    isa: str, native: Any, dtype: torch.dtype
) -> None:
    q, k, v = torch.randn(3, 1, 2, 256, 64).to(dtype)
    rows, columns = torch.randn(2, 31, 64)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(native.grid_attention(q, k, v, rows, columns, 0.125))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_what_is_no_grid_is_refused(native: Any) -> None:
    q, rows = torch.randn(1, 1, 12, 16), torch.randn(5, 16)
    call = native.grid_attention
    assert call(q, q, q, rows, torch.randn(7, 16), 1.0).isfinite().all()
    for columns, kind, text in (
        (torch.randn(9, 16), ValueError, "12 queries and 12 keys are no grid of 3 x 5"),
        (torch.randn(7, 8), ValueError, "a vector of 16 features for each of 7 distances"),
        (torch.randn(7), ValueError, "no tables of vectors"),
    ):
        with pytest.raises(kind, match=text):
            call(q, q, q, rows, columns, 1.0)
    with pytest.raises(TypeError, match="one type is wanted"):
        call(q, q.bfloat16(), q, rows, torch.randn(7, 16), 1.0)
    with pytest.raises(TypeError, match="q"):
        call(q.double(), q.double(), q.double(), rows, torch.randn(7, 16), 1.0)
