"""The reference kernels against their definitions, written out per element or with PyTorch's own functions."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from torchwright.hardware.kernels import reference as ops

H, K, D = 4, 2, 8
LENGTHS, NEW = [37, 5, 16], [6, 5, 1]
"""Three sequences: the middle of a prompt, a whole prompt, a decode step that ends a page."""
T = sum(NEW)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def new_pages(dtype: torch.dtype, pages: int = 16) -> tuple[torch.Tensor | None, ...]:
    if dtype == torch.bfloat16:
        return (
            torch.zeros(pages, K, D // 2, 16, 2, dtype=dtype),
            torch.zeros(pages, K, 8, D, 2, dtype=dtype),
            None,
            None,
        )
    k, v = torch.zeros(pages, K, D, 16, dtype=dtype), torch.zeros(pages, K, 16, D, dtype=dtype)
    if dtype != torch.int8:
        return k, v, None, None
    return k, v, torch.zeros(pages, K, 16), torch.zeros(pages, K, 16)


def tables() -> torch.Tensor:
    """Pages in no order, none used twice."""
    return torch.tensor([[7, 2, 11], [4, 0, 0], [9, 0, 0]], dtype=torch.int32)


def store(k_SKD: torch.Tensor, v_SKD: torch.Tensor, pages: tuple, row: int, q: torch.Tensor | None = None):
    """Write one sequence's keys and values without norm or rotation."""
    S = len(k_SKD)
    position = torch.arange(S)
    slots = tables()[row].long()[position // 16] * 16 + position % 16
    q = torch.zeros(S, H, D) if q is None else q
    qkv = torch.cat([q, k_SKD, v_SKD], dim=1).flatten(1)
    still = torch.empty(S, 0)
    return ops.rope_store(qkv, still, still, position, slots, *pages, H, K, None, None, 1e-6)


def attention(
    q_TD: torch.Tensor, k_SD: torch.Tensor, v_SD: torch.Tensor, window: int, cap: float
) -> torch.Tensor:
    """One head by its definition, query by query; the queries are the last of the S positions."""
    out = []
    for i, q in enumerate(q_TD):
        position = len(k_SD) - len(q_TD) + i
        first = max(0, position - window + 1) if window else 0
        scores = torch.stack([q @ k_SD[s] / math.sqrt(D) for s in range(first, position + 1)])
        if cap:
            scores = cap * torch.tanh(scores / cap)
        out.append(scores.softmax(0) @ v_SD[first : position + 1])
    return torch.stack(out)


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (9, 0.0), (1, 0.0), (0, 1.5), (20, 1.5)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.float64, 1e-6), (torch.bfloat16, 0.02), (torch.int8, 0.03)],
)
def test_paged_attention(
    dtype: torch.dtype, tolerance: float, window: int, cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "QUERY_BLOCK", 4)  # so that a sequence's queries take more than one round
    pages = new_pages(dtype)
    keys = [randn(n, K, D, seed=n) for n in LENGTHS]
    values = [randn(n, K, D, seed=n + 1) for n in LENGTHS]
    for row in range(3):
        store(keys[row], values[row], pages, row)
    q_THD = randn(T, H, D, seed=9)
    starts = torch.tensor([0, 6, 11, 12], dtype=torch.int32)
    lens = torch.tensor(LENGTHS, dtype=torch.int32)
    out = ops.paged_attention(q_THD, *pages, tables(), starts, lens, D**-0.5, window, cap)
    assert out.dtype == q_THD.dtype
    for row in range(3):
        cut = slice(int(starts[row]), int(starts[row + 1]))
        for head in range(H):
            wanted = attention(
                q_THD[cut, head], keys[row][:, head // 2], values[row][:, head // 2], window, cap
            )
            torch.testing.assert_close(out[cut, head], wanted, rtol=0, atol=tolerance)


def test_pages_are_laid_out_as_stated() -> None:
    k_SKD, v_SKD = randn(5, K, D, seed=1), randn(5, K, D, seed=2)
    k, v, _, _ = plain = new_pages(torch.float32)
    store(k_SKD, v_SKD, plain, 1)
    k2, v2, _, _ = pairs = new_pages(torch.bfloat16)
    store(k_SKD, v_SKD, pairs, 1)
    for s in range(5):
        for head in range(K):
            for d in range(D):
                assert k[4, head, d, s] == k_SKD[s, head, d]
                assert v[4, head, s, d] == v_SKD[s, head, d]
                assert k2[4, head, d // 2, s, d % 2] == k_SKD[s, head, d].bfloat16()
                assert v2[4, head, s // 2, d, s % 2] == v_SKD[s, head, d].bfloat16()


def test_int8_pages_are_symmetric_per_token_and_head() -> None:
    k_SKD = randn(5, K, D, seed=1)
    k_SKD[2, 1] = 0
    k, _, k_scale, v_scale = pages = new_pages(torch.int8)
    store(k_SKD, 3 * k_SKD, pages, 1)
    largest = k_SKD.abs().amax(-1)
    torch.testing.assert_close(k_scale[4, :, :5].T, largest / 127)
    torch.testing.assert_close(v_scale[4, :, :5].T, 3 * largest / 127)
    assert k[4, :, :, :5].abs().amax(1).T.flatten().tolist() == [127] * 5 + [0] + [127] * 4
    error = (k[4, :, :, :5].permute(2, 0, 1) * k_scale[4, :, :5].T[..., None] - k_SKD).abs()
    assert (error <= 0.5001 * largest[..., None] / 127).all()


@pytest.mark.parametrize("rotated", [0, 4, 8])
def test_rope_turns_pairs_and_leaves_the_rest(rotated: int) -> None:
    half = rotated // 2
    positions = torch.tensor([3, 0, 7])
    angle = torch.arange(10)[:, None] * torch.linspace(0.1, 1.0, half)
    q, k, v = randn(3, H, D, seed=1), randn(3, K, D, seed=2), randn(3, K, D, seed=3)
    pages = new_pages(torch.float32)
    slots = torch.tensor([16, 35, 17])
    qkv = torch.cat([q, k, v], 1).flatten(1)
    out = ops.rope_store(qkv, angle.cos(), angle.sin(), positions, slots, *pages, H, K, None, None, 1e-6)
    for t, position in enumerate(positions.tolist()):
        for x, got in ((q[t], out[t]), (k[t], pages[0][slots[t] // 16, :, :, slots[t] % 16])):
            wanted = x.clone()
            for i in range(half):
                turn = torch.complex(x[:, i], x[:, i + half]) * torch.exp(1j * angle[position, i])
                wanted[:, i], wanted[:, i + half] = turn.real, turn.imag
            torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(pages[1][slots[t] // 16, :, slots[t] % 16], v[t])


def test_rope_norms_each_head_of_queries_and_keys() -> None:
    q_norm, k_norm = 1 + randn(D, seed=4), 1 + randn(D, seed=5)
    q, k = randn(2, H, D, seed=1), randn(2, K, D, seed=2)
    still, pages = torch.empty(2, 0), new_pages(torch.float32)
    qkv = torch.cat([q, k, k], 1).flatten(1)
    slots = torch.tensor([0, 1])
    out = ops.rope_store(qkv, still, still, slots, slots, *pages, H, K, q_norm, k_norm, 1e-5)
    torch.testing.assert_close(out, F.rms_norm(q, (D,), q_norm, 1e-5))
    torch.testing.assert_close(pages[0][0, :, :, :2].permute(2, 0, 1), F.rms_norm(k, (D,), k_norm, 1e-5))
    torch.testing.assert_close(pages[1][0, :, :2].transpose(0, 1), k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    x, residual, weight = randn(3, 16).to(dtype), randn(3, 16, seed=1).to(dtype), randn(16, seed=2)
    wanted = F.rms_norm(x.double(), (16,), weight.double(), 1e-5)
    got = ops.rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got, wanted.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.rms_norm(x + residual, weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gated(dtype: torch.dtype) -> None:
    x = randn(3, 12).to(dtype)
    gate, up = x.float()[:, :6], x.float()[:, 6:]
    tolerance = {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-5}
    silu = gate / (1 + torch.exp(-gate)) * up
    gelu = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    torch.testing.assert_close(ops.gated(x, "silu"), silu.to(dtype), **tolerance)
    torch.testing.assert_close(ops.gated(x, "gelu_tanh"), gelu.to(dtype), **tolerance)
    assert ops.gated(x, "silu").dtype == dtype
