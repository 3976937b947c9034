"""Norms, gates and the rotary embedding with its cache writes on Triton's kernels, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_device import DEVICE, ops, poison, randn

from torchwright.hardware.kernels import reference

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
"""NumPy's, of the sigmoid of a large negative number, which is 0 as it should be."""
DTYPES = [torch.float32, torch.bfloat16]
CACHES = [torch.float32, torch.bfloat16, torch.int8]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Against float64: float32 within 2e-6 of values around 1, bfloat16 within one rounding more."""
    step = 2**-8 if found.dtype == torch.bfloat16 else 0
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted.double(), atol=2e-6, rtol=step + 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    x, residual, weight = randn(2, 3, 96).to(dtype), randn(2, 3, 96, seed=1).to(dtype), randn(96, seed=2)
    poison(x)
    close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(normed, reference.rms_norm(total.double(), weight.double(), 1e-5))
    assert torch.equal(ops.rms_norm(x[1, 2], weight, 1e-5), ops.rms_norm(x, weight, 1e-5)[1, 2])
    assert ops.rms_norm(x[:0], weight, 1e-5).shape == (0, 3, 96)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "rms alone", "layer", "layer without bias", "layer alone"])
def test_norms_with_gradients(kind: str, dtype: torch.dtype) -> None:
    """70 rows are two programs of the backward pass; 96 features are not a power of two."""
    kind, _, without = kind.partition(" ")
    x, grad = randn(2, 35, 96).to(dtype), randn(2, 35, 96, seed=3).to(dtype)
    weight = None if without == "alone" else 1 + randn(96, seed=1)
    bias = randn(96, seed=2) if kind == "layer" and not without else None
    wide = [one.double().requires_grad_() for one in (x, weight, bias) if one is not None]
    function = torch.nn.functional.layer_norm if kind == "layer" else torch.nn.functional.rms_norm
    wanted = function(wide[0], (96,), *wide[1:], eps=1e-5)
    poison(x)
    out, mean, inverse = ops.norm(x, weight, bias, 1e-5, kind == "layer")
    close(out, wanted)
    asked = [True, weight is not None, bias is not None]
    found = ops.norm_backward(grad, x, mean, inverse, weight, asked)
    exact = torch.autograd.grad(wanted, wide, grad.double())
    for one, of_torch in zip((f for f, a in zip(found, asked, strict=True) if a), exact, strict=True):
        torch.testing.assert_close(
            one.double(), of_torch, atol=2e-5 * max(1.0, float(of_torch.abs().max())), rtol=2**-8
        )
    assert [one.numel() > 0 for one in found] == asked
    # A row is computed as it is alone.
    alone = ops.norm_backward(grad[1, 4], x[1, 4], mean[39:40], inverse[39:40], weight, [True, False, False])
    assert torch.equal(alone[0], found[0][1, 4])
    assert ops.norm(x[:0], weight, bias, 1e-5, False)[0].shape == (0, 35, 96)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gated(dtype: torch.dtype, kind: str) -> None:
    x = (randn(3, 2 * 1100) * 4).to(dtype)
    poison(x[:, :1100])
    close(ops.gated(x, kind), reference.gated(x.double(), kind))


def caches(kind: torch.dtype, K: int, D: int) -> list[torch.Tensor | None]:
    pages: list[torch.Tensor | None] = [
        torch.full(shape, 77, dtype=kind, device=DEVICE) for shape in ((6, K, D, 16), (6, K, 16, D))
    ]
    scales = [torch.full((6, K, 16), 77.0, device=DEVICE) for _ in range(2)]
    return [*pages, *scales] if kind == torch.int8 else [*pages, None, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    ("heads", "half", "norms"), [((4, 2, 48), 20, "qk"), ((3, 1, 16), 8, ""), ((17, 3, 32), 0, "q")]
)
def test_rope_store(
    dtype: torch.dtype, cache: torch.dtype, heads: tuple[int, int, int], half: int, norms: str
) -> None:
    """Queries, what the slots hold, and that every other slot is as it was; 17 + 6 heads take two programs."""
    H, K, D = heads
    tokens = 4
    qkv = randn(tokens, (H + 2 * K) * D, seed=D).to(dtype)
    angle = randn(30, half, seed=1)
    positions, slots = torch.tensor([3, 0, 29, 4]), torch.tensor([95, 17, 0, 40])
    found, wanted = caches(cache, K, D), caches(cache, K, D)
    rest = (H, K, *(randn(D, seed=3) if name in norms else None for name in "qk"), 1e-6)
    where = (angle.cos(), angle.sin(), positions.to(DEVICE), slots.to(DEVICE))
    q = ops.rope_store(qkv, *where, *found, *rest)
    close(q, reference.rope_store(qkv.float(), *where, *wanted, *rest))
    for mine, theirs in zip(found, wanted, strict=True):
        if mine is None or theirs is None:
            continue
        if mine.dtype == torch.int8:  # a last digit of the norm may turn a half
            assert int((mine.int() - theirs.int()).abs().max()) <= 1
            assert float((mine != theirs).float().mean()) < 0.002
        else:
            close(mine, theirs)
    alone = caches(cache, K, D)
    parts = [
        ops.rope_store(qkv[i : i + 1], *where[:2], where[2][i : i + 1], where[3][i : i + 1], *alone, *rest)
        for i in range(tokens)
    ]
    assert torch.equal(torch.cat(parts), q)
    assert all(a is None or b is None or torch.equal(a, b) for a, b in zip(alone, found, strict=True))


def test_slots_out_of_range_are_not_written() -> None:
    pages = caches(torch.float32, 1, 16)
    positions, slots = torch.tensor([0, 10**9, -5]), torch.tensor([-1, 96, 10**12])
    angle = randn(4, 8)
    q = ops.rope_store(
        randn(3, 48),
        angle.cos(),
        angle.sin(),
        positions.to(DEVICE),
        slots.to(DEVICE),
        *pages,
        1,
        1,
        None,
        None,
        1e-6,
    )
    assert q.isfinite().all()
    assert all(page is None or bool((page == 77).all()) for page in pages)


def test_operators_pass_the_checks_of_torch() -> None:
    x, weight = randn(2, 96), randn(96)
    angle = randn(9, 4)
    slots = torch.tensor([16, 17], device=DEVICE)
    pages = caches(torch.int8, 2, 16)
    turned = (randn(2, 96), angle.cos(), angle.sin())
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.rms_norm, (x, weight, 1e-5)),
        (ops.add_rms_norm, (x, x.clone(), weight, 1e-5)),
        (ops.gated, (x, "silu")),
        (ops.rope_store, (*turned, slots - 16, slots, *pages, 2, 2, None, weight[:16], 1e-5)),
    ]  # fmt: skip
    for operator, arguments in calls:
        torch.library.opcheck(operator.default, arguments)


def test_arguments_are_checked() -> None:
    x, angle = randn(2, 96), randn(4, 8)
    at = torch.tensor([0, 1], device=DEVICE)
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        ops.rms_norm(x.double(), x[0], 1e-5)
    with pytest.raises(ValueError, match="weight must be"):
        ops.rms_norm(x, x[0, 1:], 1e-5)
    with pytest.raises(ValueError, match="residual and x differ"):
        ops.add_rms_norm(x, x[:1], x[0].contiguous(), 1e-5)
    with pytest.raises(ValueError, match="silu or gelu_tanh"):
        ops.gated(x, "relu")
    with pytest.raises(ValueError, match="side by side"):
        ops.gated(x[:, 1:].contiguous(), "silu")
    k, v = torch.zeros(2, 2, 16, 16, device=DEVICE), torch.zeros(2, 2, 16, 16, device=DEVICE)

    def refused(match: str, error: type[Exception] = ValueError, **changed: Any) -> None:
        arguments = {
            "qkv": x,
            "cos": angle,
            "sin": angle,
            "positions": at,
            "slots": at,
            "k_pages": k,
            "v_pages": v,
        }
        more = {
            "k_scale": None,
            "v_scale": None,
            "heads": 2,
            "kv_heads": 2,
            "q_norm": None,
            "k_norm": None,
            "eps": 1e-6,
        }
        with pytest.raises(error, match=match):
            ops.rope_store(**{**arguments, **more, **changed})

    refused("is not 3 ", heads=3)
    refused("is not 4 ", heads=4, kv_heads=1)
    refused("positions must be", positions=at[:1])
    refused("slots must be", slots=at.int())
    refused("rotated / 2", cos=randn(4, 9), sin=randn(4, 9))
    refused("rotated / 2", cos=randn(4, 7))
    refused("q_norm must be", q_norm=x[0, :17].contiguous())
    refused("k_pages and v_pages must be", v_pages=v[:1])
    refused("k_pages and v_pages must be", k_pages=torch.zeros(2, 2, 8, 16, 2, device=DEVICE))
    refused("contiguous", k_pages=k.transpose(2, 3))
    refused("need k_scale", k_pages=k.to(torch.int8), v_pages=v.to(torch.int8))
    refused("bfloat16 or int8", TypeError, k_pages=k.double(), v_pages=v.double())
