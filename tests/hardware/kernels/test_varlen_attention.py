"""Attention of ragged sequences with rotary embeddings against float64, alone and in company."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchwright.hardware.kernels import reference

ERROR = {torch.float32: 3e-6, torch.bfloat16: 8e-3}
"""Relative (Frobenius): sums in another order; turned queries and keys, weights and outputs rounded to bfloat16."""
SHAPES = [
    ([64, 64, 64], 2, 80),
    ([1, 17, 0, 5, 130], 3, 16),
    ([33], 1, 72),
    ([300, 2], 2, 64),
    ([7, 9], 2, 6),
    ([40, 24], 1, 96),
]
"""Lengths of sequences, heads, head size."""


def operands(
    lengths: list[int], heads: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    tokens = sum(lengths)
    angles_NR = torch.randn(tokens, size // 2) * 3
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return torch.randn(tokens, 3 * heads * size).to(dtype), angles_NR.cos(), angles_NR.sin(), starts


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_varlen_attention(isa: str, native: Any, shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    lengths, heads, size = shape
    qkv, cos, sin, starts = operands(lengths, heads, size, dtype)
    got = native.varlen_attention(qkv, cos, sin, starts, heads, size**-0.5)
    wanted = reference.varlen_attention(qkv.double(), cos.double(), sin.double(), starts, heads, size**-0.5)
    assert got.shape == wanted.shape
    assert got.dtype == dtype
    assert float((got.double() - wanted).norm() / wanted.norm()) <= ERROR[dtype]


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("size", [72, 80])
def test_a_sequence_has_the_same_bits_alone_and_beside_others(
    isa: str, native: Any, size: int, dtype: torch.dtype
) -> None:
    """On any number of threads, and beside sequences of NaN."""
    lengths = [33, 200, 64, 1]
    qkv, cos, sin, starts = operands(lengths, 2, size, dtype)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            whole = native.varlen_attention(qkv, cos, sin, starts, 2, 0.125)
            for start, stop in zip(starts.tolist(), starts.tolist()[1:], strict=False):
                own, alone = slice(start, stop), torch.tensor([0, stop - start]).int()
                single = native.varlen_attention(qkv[own], cos[own], sin[own], alone, 2, 0.125)
                assert torch.equal(whole[own], single)
                broken = torch.full_like(qkv, torch.nan)
                broken[own] = qkv[own]
                among = native.varlen_attention(broken, cos, sin, starts, 2, 0.125)
                assert torch.equal(among[own], single)
                assert among.isnan().sum() == (len(qkv) - stop + start) * among.shape[1]
    finally:
        torch.set_num_threads(before)


def test_what_does_not_fit_is_refused(native: Any) -> None:
    qkv, cos, sin, starts = operands([5, 3], 2, 16, torch.float32)
    call = native.varlen_attention
    assert call(qkv, cos, sin, starts, 2, 1.0).isfinite().all()
    for arguments, kind, text in (
        ((qkv, cos, sin, starts, 5, 1.0), ValueError, "not queries, keys and values of 5 heads"),
        ((qkv[:, :18], cos, sin, starts, 2, 1.0), ValueError, "heads of 3 features"),
        ((qkv, cos[:4], sin, starts, 2, 1.0), ValueError, "cos must be"),
        ((qkv, cos, sin.double(), starts, 2, 1.0), ValueError, "sin must be"),
        ((qkv, cos, sin, starts.long(), 2, 1.0), ValueError, "starts must be"),
        ((qkv, cos, sin, starts[:0], 2, 1.0), ValueError, "no list of sequences"),
        ((qkv, cos, sin, starts[:2], 2, 1.0), IndexError, "does not cover the 8 tokens"),
        (
            (qkv, cos, sin, torch.tensor([0, 9, 8]).int(), 2, 1.0),
            IndexError,
            "sequence 1 ends before it begins",
        ),
        ((qkv.double(), cos, sin, starts, 2, 1.0), TypeError, "qkv"),
    ):
        with pytest.raises(kind, match=text):
            call(*arguments)
