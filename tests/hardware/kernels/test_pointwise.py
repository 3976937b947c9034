"""Norms, gates and the rotary embedding with its cache write: the compiled kernels against the reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchwright.hardware.kernels import ops, reference

WIDTHS = [1, 7, 15, 16, 17, 33, 100, 576, 1031]
KINDS = [torch.float32, torch.bfloat16, torch.int8]
RELATIVE = {torch.float32: 3e-6, torch.bfloat16: 2**-8 + 3e-6}
H, K = 3, 2


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(found: torch.Tensor, wanted: torch.Tensor, atol: float = 0.0) -> None:
    """Within the rounding of what was stored."""
    torch.testing.assert_close(found.double(), wanted.double(), rtol=RELATIVE[found.dtype], atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(isa: str, width: int, dtype: torch.dtype) -> None:
    weight = 1 + randn(width, seed=2)
    for shape in [(0,), (1,), (5,), (2, 3), ()]:
        x = (randn(*shape, width) * 3).to(dtype)
        residual = randn(*shape, width, seed=1).to(dtype)
        found = ops.rms_norm(x, weight, 1e-5)
        assert (found.dtype, found.shape) == (dtype, x.shape)
        close(found, reference.rms_norm(x.double(), weight.double(), 1e-5))
        normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, x + residual)
        close(normed, reference.rms_norm(total.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_zeros_and_of_large_values(isa: str, dtype: torch.dtype) -> None:
    x = torch.stack([torch.zeros(40), randn(40) * 1e15, randn(40) * 1e-15]).to(dtype)
    weight = torch.ones(40)
    found = ops.rms_norm(x, weight, 1e-6)
    close(found, reference.rms_norm(x.double(), weight.double(), 1e-6))
    assert not found[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("width", WIDTHS)
def test_gated(isa: str, width: int, kind: str, dtype: torch.dtype) -> None:
    for shape in [(0,), (1,), (5,), (2, 3), ()]:
        x = (randn(*shape, 2 * width) * 3).to(dtype)
        found = ops.gated(x, kind)
        assert (found.dtype, found.shape) == (dtype, (*shape, width))
        close(found, reference.gated(x.double(), kind), atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["relu", "gelu", "gelu_tanh", "silu", "sigmoid"])
def test_activate(isa: str, kind: str, dtype: torch.dtype) -> None:
    for shape in [(0, 5), (1, 7), (2, 3, 16), (4, 33), (2, 576)]:
        x = (randn(*shape) * 3).to(dtype)
        found = ops.activate(x, kind)
        assert (found.dtype, found.shape) == (dtype, x.shape)
        close(found, reference.activate(x.double(), kind), atol=3e-6)


@pytest.mark.parametrize("kind", ["silu", "sigmoid"])
def test_activations_far_from_zero(isa: str, kind: str) -> None:
    far = torch.tensor([16.0, 79.0, 81.0, 88.5, 127.0, 129.0, 1e4, 1e30])
    x = torch.cat([far, -far, torch.tensor([float("inf"), float("nan")])])
    found, wanted = ops.activate(x, kind).double(), getattr(torch.nn.functional, kind)(x.double())
    torch.testing.assert_close(found, wanted, rtol=5e-6, atol=2e-33, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_gates_far_from_zero(isa: str, kind: str, dtype: torch.dtype) -> None:
    gate = torch.tensor(
        [-1e30, -1e4, -200, -100, -89, -88, -87, -20, -1e-20, 0, 1e-20, 20, 88, 100, 1e4, 1e30]
    )
    for width in (16, 7):
        x = torch.cat([gate[:width], torch.ones(width)]).to(dtype)
        close(ops.gated(x, kind), reference.gated(x.double(), kind), atol=1e-5)


def test_a_clamped_gate_keeps_nan_and_its_limits(isa: str) -> None:
    nan, inf = float("nan"), float("inf")
    gate, up = torch.tensor([nan, 1, inf, -1e30, 8, 1, 1]), torch.tensor([1, nan, inf, 1, -9, 9, -inf])
    for width in (7, 35):
        x = torch.cat([gate.repeat(width // 7), up.repeat(width // 7)])
        found, wanted = ops.gated(x, "clamped_swiglu"), reference.gated(x.double(), "clamped_swiglu")
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert found[:2].isnan().all()
        assert found[2:3].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 100, 576])
def test_rows_do_not_depend_on_each_other(isa: str, width: int, dtype: torch.dtype) -> None:
    """To the bit, over every number of rows."""
    x, residual = randn(512, 2 * width).to(dtype), randn(512, 2 * width, seed=1).to(dtype)
    weight = randn(2 * width, seed=2)
    whole = (
        ops.rms_norm(x, weight, 1e-5),
        *ops.add_rms_norm(x, residual, weight, 1e-5),
        ops.gated(x, "silu"),
        ops.gated(x, "gelu_tanh"),
    )
    for cut in [slice(0, rows) for rows in (*range(1, 27), 191, 192, 193, 385)] + [
        slice(511, 512),
        slice(100, 300),
    ]:
        part = (
            ops.rms_norm(x[cut], weight, 1e-5),
            *ops.add_rms_norm(x[cut], residual[cut], weight, 1e-5),
            ops.gated(x[cut], "silu"),
            ops.gated(x[cut], "gelu_tanh"),
        )
        assert all(torch.equal(a, b[cut]) for a, b in zip(part, whole, strict=True)), cut


def test_strides_do_not_matter(native: Any) -> None:
    x, weight = randn(40, 6).T, randn(40, seed=1)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), ops.rms_norm(x.contiguous(), weight, 1e-5))
    assert torch.equal(ops.gated(x, "silu"), ops.gated(x.contiguous(), "silu"))
    normed, total = ops.add_rms_norm(x, x, weight, 1e-5)
    assert torch.equal(total, x + x)
    assert normed.is_contiguous()


def test_arguments_of_norms_and_gates_are_checked(native: Any) -> None:
    x, weight = randn(3, 40), randn(40)
    for bad in (weight[:-1], weight.bfloat16(), weight.double(), randn(80)[::2]):
        with pytest.raises(ValueError, match="weight must be a contiguous float32 tensor of 40 values"):
            native.rms_norm(x, bad, 1e-5)
    for bad in (x.double(), x.half(), x.to(torch.int8), x.long()):
        with pytest.raises(TypeError, match="float32 or bfloat16"):
            native.rms_norm(bad, weight, 1e-5)
        with pytest.raises(TypeError, match="float32 or bfloat16"):
            native.add_rms_norm(bad, bad, weight, 1e-5)
        with pytest.raises(TypeError, match="float32 or bfloat16"):
            native.gated(bad, "silu")
    for bad in (x[:2], x.bfloat16(), x[:, :39], x[None]):
        with pytest.raises(ValueError, match="residual and x differ"):
            native.add_rms_norm(x, bad, weight, 1e-5)
    for bad in (x[:, :0], torch.tensor(1.0)):
        with pytest.raises(ValueError, match="features in its last"):
            native.rms_norm(bad, weight, 1e-5)
        with pytest.raises(ValueError, match="features in its last"):
            native.gated(bad, "silu")
    with pytest.raises(ValueError, match="side by side; its width is 39"):
        native.gated(x[:, :39], "silu")
    with pytest.raises(ValueError, match="kind is relu; silu, gelu_tanh"):
        native.gated(x, "relu")


def new_pages(kind: torch.dtype, D: int, count: int = 5) -> list[torch.Tensor | None]:
    """Pages, and scales of int8 ones, that nobody has written."""
    if kind == torch.bfloat16:
        shapes = (count, K, D // 2, 16, 2), (count, K, 8, D, 2)
    else:
        shapes = (count, K, D, 16), (count, K, 16, D)
    if kind == torch.int8:
        pages = [torch.full(shape, -128, dtype=kind) for shape in shapes]
        return [*pages, *(torch.full((count, K, 16), torch.nan) for _ in range(2))]
    return [*(torch.full(shape, torch.nan, dtype=kind) for shape in shapes), None, None]


def rope_arguments(
    D: int, rotated: int, dtype: torch.dtype = torch.float32, *, norms: bool = True
) -> list[Any]:
    """What `rope_store` takes beside the pages: eleven tokens in slots of several pages, in no order."""
    angle = torch.arange(40)[:, None] * torch.linspace(0.05, 1.0, rotated // 2)
    slots = torch.tensor([79, 0, 15, 16, 17, 33, 40, 63, 64, 5, 20])
    return [
        randn(11, (H + 2 * K) * D).to(dtype),
        angle.cos(),
        angle.sin(),
        torch.tensor([39, 0, 1, 2, 3, 4, 30, 7, 7, 5, 20]),
        slots,
        *(1 + randn(D, seed=seed) if norms else None for seed in (1, 2)),
    ]


def rope(function: Any, arguments: list[Any], pages: list[Any]) -> torch.Tensor:
    qkv, cos, sin, positions, slots, q_norm, k_norm = arguments
    return function(qkv, cos, sin, positions, slots, *pages, H, K, q_norm, k_norm, 1e-6)


def same_pages(found: list[torch.Tensor | None], wanted: list[torch.Tensor | None]) -> None:
    for a, b in zip(found, wanted, strict=True):
        if a is None or b is None:
            assert a is b
        elif a.dtype == torch.int8:
            assert int((a.int() - b.int()).abs().max()) <= 1
            assert float((a != b).float().mean()) < 1e-3
        else:
            # A step of bfloat16 where the two round a number to either side.
            rtol = 2**-7 if a.dtype == torch.bfloat16 else 3e-6
            torch.testing.assert_close(a, b, rtol=rtol, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("D", "rotated"), [(16, 16), (48, 0), (64, 64), (80, 32), (128, 2), (256, 256), (512, 64)]
)
def test_rope_and_store(
    isa: str, D: int, rotated: int, kind: torch.dtype, dtype: torch.dtype, norms: bool
) -> None:
    """Queries, pages and scales as the reference has them, and every other slot as it was."""
    arguments = rope_arguments(D, rotated, dtype, norms=norms)
    found_pages, wanted_pages = new_pages(kind, D), new_pages(kind, D)
    found = rope(ops.native.rope_store, arguments, found_pages)
    wanted = rope(reference.rope_store, [arguments[0].double(), *arguments[1:]], wanted_pages)
    assert (found.dtype, found.shape) == (dtype, (11, H, D))
    close(found, wanted, atol=1e-6)
    same_pages(found_pages, wanted_pages)


@pytest.mark.parametrize("kind", KINDS)
def test_without_norm_and_rotation_nothing_is_computed(isa: str, kind: torch.dtype) -> None:
    arguments = rope_arguments(48, 0, norms=False)
    found_pages, wanted_pages = new_pages(kind, 48), new_pages(kind, 48)
    q = rope(ops.native.rope_store, arguments, found_pages)
    assert torch.equal(q, arguments[0].view(11, -1, 48)[:, :H])
    rope(reference.rope_store, arguments, wanted_pages)
    for a, b in zip(found_pages, wanted_pages, strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_depend_on_each_other(isa: str, kind: torch.dtype) -> None:
    """To the bit: all at once, in chunks, and one by one."""
    arguments = rope_arguments(64, 32)
    wanted_pages = new_pages(kind, 64)
    wanted = rope(ops.native.rope_store, arguments, wanted_pages)
    for size in (1, 2, 5):
        pages, parts = new_pages(kind, 64), []
        for first in range(0, 11, size):
            cut = slice(first, first + size)
            qkv, cos, sin, positions, slots, *norms = arguments
            parts.append(
                rope(ops.native.rope_store, [qkv[cut], cos, sin, positions[cut], slots[cut], *norms], pages)
            )
        assert torch.equal(torch.cat(parts), wanted)
        for a, b in zip(pages, wanted_pages, strict=True):
            if a is not None and b is not None:
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_int8_keys_of_zeros_and_of_tiny_values(isa: str) -> None:
    """Their scale is what it is, and no integer comes from 0 · ∞."""
    arguments = rope_arguments(64, 0, norms=False)
    arguments[0] = arguments[0] * torch.tensor([0, 1e-37, 1e-39, 1e-44, *[1.0] * 7])[:, None]
    for function in (ops.native.rope_store, reference.rope_store):
        k, v, k_scale, v_scale = pages = new_pages(torch.int8, 64)
        rope(function, arguments, pages)
        assert k is not None
        assert v is not None
        assert k_scale is not None
        assert v_scale is not None
        for slot in (79, 0, 15, 16):
            page, at = divmod(slot, 16)
            assert bool((k[page, :, :, at].float() * k_scale[page, :, at, None]).abs().max() <= 1e-36)
            assert bool((v[page, :, at].float() * v_scale[page, :, at, None]).abs().max() <= 1e-36)


def test_nothing_to_store(native: Any) -> None:
    pages = new_pages(torch.float32, 16)
    none = torch.empty(0, dtype=torch.int64)
    still = torch.empty(4, 0)
    q = native.rope_store(torch.empty(0, 7 * 16), still, still, none, none, *pages, H, K, None, None, 1e-6)
    assert q.shape == (0, H, 16)
    assert pages[0] is not None
    assert bool(pages[0].isnan().all())


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_of_rope_are_checked(native: Any, kind: torch.dtype) -> None:
    names = ("qkv", "cos", "sin", "positions", "slots", "q_norm", "k_norm")
    good = dict(zip(names, rope_arguments(64, 32), strict=True))
    sizes = {"heads": H, "kv_heads": K}

    def refused(error: type[Exception], match: str, **changed: Any) -> None:
        pages = dict(zip(("k", "v", "k_scale", "v_scale"), new_pages(kind, 64), strict=True))
        a = {**good, **sizes, **pages, **changed}
        order = (
            "qkv",
            "cos",
            "sin",
            "positions",
            "slots",
            "k",
            "v",
            "k_scale",
            "v_scale",
            "heads",
            "kv_heads",
        )
        with pytest.raises(error, match=match):
            native.rope_store(*[a[name] for name in order], a["q_norm"], a["k_norm"], 1e-6)
        for tensor in pages.values():  # nothing was written before the fault was found
            assert tensor is None or bool((tensor.isnan() | (tensor == -128)).all())

    def with_last(name: str, value: int) -> dict[str, torch.Tensor]:
        tensor = good[name].clone()
        tensor[-1] = value
        return {name: tensor}

    for bad in (-1, 40, 2**62, -(2**63)):
        refused(IndexError, f"position {bad} is beyond the 40", **with_last("positions", bad))
    for bad in (-1, 80, 2**62, -(2**63)):
        refused(IndexError, f"slot {bad} is beyond the 5 pages", **with_last("slots", bad))
    for name in ("positions", "slots"):
        for bad in (good[name][1:], good[name].int(), good[name].repeat_interleave(2)[::2]):
            refused(ValueError, f"{name} must be", **{name: bad})
    qkv = good["qkv"]
    refused(ValueError, "not 3 . 2 x 2 heads of 64", qkv=qkv[:, :-1])
    refused(ValueError, "not 3 . 2 x 2 heads of 64", qkv=qkv[0])
    refused(ValueError, "heads of 64", qkv=torch.tensor(1.0))
    refused(ValueError, "heads of 64", heads=4)
    refused(ValueError, "heads of 64", heads=0)
    refused(ValueError, "heads of 64", heads=5, kv_heads=1)
    refused(ValueError, "heads of 64", heads=-1, kv_heads=4)
    refused(TypeError, "float32 or bfloat16", qkv=qkv.double())
    refused(TypeError, "float32 or bfloat16", qkv=qkv.to(torch.int8))
    refused(ValueError, "cos and sin must be", cos=good["cos"][:, 1:])
    refused(ValueError, "cos and sin must be", cos=torch.zeros(40, 33), sin=torch.zeros(40, 33))
    refused(ValueError, "cos and sin must be", cos=torch.zeros(16), sin=torch.zeros(16))
    refused(ValueError, "cos must be", cos=good["cos"].double())
    refused(ValueError, "sin must be", sin=good["sin"].bfloat16())
    for name in ("q_norm", "k_norm"):
        refused(ValueError, f"{name} must be", **{name: torch.ones(63)})
        refused(ValueError, f"{name} must be", **{name: torch.ones(64, dtype=torch.bfloat16)})
    if kind == torch.int8:
        refused(ValueError, "need k_scale and v_scale", v_scale=None)
        refused(ValueError, "k_scale must be", k_scale=torch.zeros(4, K, 16))
