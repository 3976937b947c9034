"""Attention over a grid of places on Triton's kernel against float64, with the bias of every pair written down."""

from __future__ import annotations

import pytest
import torch
from test_grid_attention import exact
from triton_device import DEVICE, ops, poison, randn

from torchwright.hardware.kernels.gpu import grid

ERROR = {torch.float32: 3e-6, torch.bfloat16: 6e-3}
"""Relative (Frobenius): sums in another order; weights and outputs rounded to bfloat16."""


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize(
    ("shape", "widest"),
    [
        ((1, 2, 5, 7, 16), 64),
        ((1, 1, 1, 1, 32), 64),
        ((2, 1, 3, 20, 24), 16),
        ((1, 1, 6, 14, 80), 64),
        ((1, 1, 9, 20, 64), 64),
        ((1, 2, 3, 64, 16), 64),
    ],
    ids=str,
)
def test_grid_attention(
    shape: tuple[int, ...], widest: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch, heads, rows, columns, head size; `widest` 16: rows in several tiles, the last not full.

    The others have one or several whole rows a tile.
    """
    monkeypatch.setattr(grid, "WIDEST", widest)
    B, H, Y, X, D = shape
    q = randn(B, Y * X, H, D, seed=1).to(dtype).transpose(1, 2)
    k = randn(B, H, Y * X, 2 * D, seed=2).to(dtype)[..., D:]
    v = randn(B, H, D, Y * X, seed=3).to(dtype).transpose(2, 3)
    rows, columns = randn(2 * Y - 1, D, seed=4) * D**-0.5, (randn(2 * X - 1, D, seed=5) * D**-0.5).to(dtype)
    poison(q)
    got = ops.grid_attention(q, k, v, rows, columns, D**-0.5)
    wanted = exact(*(each.cpu() for each in (q, k, v, rows, columns)), Y, X, D**-0.5)
    assert got.shape == q.shape
    assert got.dtype == dtype
    assert got.transpose(1, 2).is_contiguous()
    assert float((got.cpu().double() - wanted).norm() / wanted.norm()) <= ERROR[dtype]


def test_large_scores_do_not_overflow() -> None:
    q = randn(1, 1, 12, 16, seed=6) * 100
    rows, columns = randn(5, 16, seed=7), randn(7, 16, seed=8)
    got = ops.grid_attention(q, q, q, rows, columns, 1.0)
    wanted = exact(*(each.cpu() for each in (q, q, q, rows, columns)), 3, 4, 1.0)
    torch.testing.assert_close(got.cpu().double(), wanted, atol=1e-3, rtol=1e-3)


def test_what_is_no_grid_is_refused() -> None:
    q, rows = torch.randn(1, 1, 12, 16, device=DEVICE), torch.randn(5, 16, device=DEVICE)
    call = ops.grid_attention
    good = torch.randn(7, 16, device=DEVICE)
    assert call(q, q, q, rows, good, 1.0).isfinite().all()
    for columns, text in (
        (torch.randn(9, 16, device=DEVICE), "12 queries and 12 keys are no grid of 3 x 5"),
        (torch.randn(7, 8, device=DEVICE), "a vector of 16 features for each of 7 distances"),
        (torch.randn(7, device=DEVICE), "no tables of vectors"),
    ):
        with pytest.raises(ValueError, match=text):
            call(q, q, q, rows, columns, 1.0)
    with pytest.raises(ValueError, match=r"\(B, H, T, D\) is wanted"):
        call(q, q[:, :, :6], q, rows, good, 1.0)
    with pytest.raises(TypeError, match="one type is wanted"):
        call(q, q.bfloat16(), q, rows, good, 1.0)
    with pytest.raises(TypeError, match="q is"):
        call(q.double(), q.double(), q.double(), rows, good, 1.0)
