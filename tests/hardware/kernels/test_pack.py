"""Packed bytes give back what was packed; rounding loses no more than it must."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchwright.core.scheme import GROUPS, MADE
from torchwright.hardware.kernels import pack
from torchwright.hardware.kernels.linear import PackedLinear

SIZES = {"N": st.integers(1, 140), "K": st.integers(1, 300), "seed": st.integers(0, 2**31)}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Integers, multipliers, scale."""


def weighted(weight: torch.Tensor, found: Quantized, group: int, importance: torch.Tensor) -> torch.Tensor:
    """The squared error of each group (N, G) in float64."""
    integers, multipliers, scale_N = found
    N, K = weight.shape
    groups = multipliers.shape[1]
    wide = integers.double() * multipliers.double().repeat_interleave(group, 1)[:, :K] * scale_N[:, None]
    error = (wide - weight.double()).square() * importance.double()
    return torch.nn.functional.pad(error, (0, groups * group - K)).view(N, groups, group).sum(2)


def plain(weight: torch.Tensor, group: int) -> Quantized:
    """Nearest integers on the least multiplier with which a group's largest weight is not clipped."""
    N, K = weight.shape
    groups = torch.nn.functional.pad(weight, (0, -K % group)).view(N, -1, group)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    full = torch.where(largest == 0, 1e-12, largest) / -8
    scale = full.abs().amax(1, keepdim=True) / 15
    multiplier = (full.abs() / scale).ceil().clamp(1, 15) * full.sign()
    integers = torch.round(groups / (multiplier * scale)).clamp(-8, 7)
    return integers.flatten(1)[:, :K], multiplier.squeeze(2), scale.flatten()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(**SIZES)
def test_w8_comes_back(N: int, K: int, seed: int) -> None:
    integers = torch.randint(-127, 128, (N, K), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    depth = pack.padded_depth(K)
    packed = pack.pack_w8(integers)
    assert (packed.dtype, packed.shape) == (torch.uint8, (-(-N // 64) * 64 * depth,))
    found = pack.unpack_w8(packed, N, depth)
    assert torch.equal(found[:, :K], integers)
    assert not found[:, K:].any()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(**SIZES)
def test_bf16_comes_back(N: int, K: int, seed: int) -> None:
    weight = randn(N, K, seed=seed).bfloat16()
    depth = pack.padded_depth(K)
    packed = pack.pack_bf16(weight)
    assert (packed.dtype, packed.shape) == (torch.uint8, (-(-N // 64) * 64 * depth * 2,))
    found = pack.unpack_bf16(packed, N, depth)
    assert torch.equal(found[:, :K], weight)
    assert not found[:, K:].any()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(**SIZES, group=st.sampled_from(GROUPS))
def test_w4_comes_back(N: int, K: int, seed: int, group: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-8, 8, (N, K), generator=generator).to(torch.int8)
    multipliers = torch.randint(-15, 16, (N, -(-K // group)), generator=generator).to(torch.int8)
    depth = pack.padded_depth(K, group)
    packed = pack.pack_w4(integers, multipliers, group)
    assert (packed.dtype, packed.shape) == (torch.uint8, (-(-N // 64) * 64 * (depth // 2 + depth // group),))
    found, times = pack.unpack_w4(packed, N, depth, group)
    assert torch.equal(found[:, :K], integers)
    assert not found[:, K:].any()
    assert torch.equal(times[:, : multipliers.shape[1]], multipliers)
    assert not times[:, multipliers.shape[1] :].any()


def test_bytes_lie_as_stated() -> None:
    """One element of each layout, found by the formula of the module's docstring."""
    n, k, K = 64 + 16 + 5, 64 + 11, 128
    integers = torch.zeros(128, K, dtype=torch.int8)
    integers[n, k] = 3
    w8 = pack.pack_w8(integers).view(2, K // 4, 4, 16, 4)
    assert w8[1, k // 4, 1, 5, k % 4] == 131
    assert int((w8 != 128).sum()) == 1
    bf16 = pack.pack_bf16(integers.float()).view(torch.bfloat16).view(2, K // 2, 4, 16, 2)
    assert bf16[1, k // 2, 1, 5, k % 2] == 3
    assert int((bf16 != 0).sum()) == 1
    multipliers = torch.arange(-64, 64)[:, None].expand(128, 2).to(torch.int8)
    w4 = pack.pack_w4(integers, multipliers, 64).view(2, 2, 64 + 64 * 32)
    assert torch.equal(w4[1, :, :64].view(torch.int8), multipliers[64:].T)
    lanes = w4[1, 1, 64:].view(8, 4, 16, 4)
    assert lanes[1, 1, 5, 3] == 0x8B  # k = 64 + 8 + 3: the low half
    assert int((lanes != 0x88).sum()) == 1
    integers[n, k], integers[n, k + 2] = 0, 3
    lanes = pack.pack_w4(integers, multipliers, 64).view(2, 2, -1)[1, 1, 64:].view(8, 4, 16, 4)
    assert lanes[1, 1, 5, 1] == 0xB8  # k = 64 + 8 + 5: the high half of byte 5 - 4


@settings(max_examples=40, deadline=None, derandomize=True)
@given(**SIZES, size=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
def test_w8_is_off_by_half_a_step(N: int, K: int, seed: int, size: float) -> None:
    weight = randn(N, K, seed=seed) * size
    integers, scale_N = pack.quantize_w8(weight)
    assert (integers.dtype, scale_N.dtype) == (torch.int8, torch.float32)
    if size >= 1e-3:  # below, the scale has a floor
        assert integers.abs().amax(1).tolist() == [127] * N
    error = (integers.double() * scale_N.double()[:, None] - weight.double()).abs()
    assert bool((error <= 0.50001 * scale_N.double()[:, None]).all())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(**SIZES, group=st.sampled_from(GROUPS), size=st.sampled_from([1e-3, 1.0, 1e6]))
def test_w4_is_never_worse_than_its_plain_multiplier(
    N: int, K: int, seed: int, group: int, size: float
) -> None:
    weight = randn(N, K, seed=seed) * size
    importance = randn(K, seed=seed + 1).square()
    for weights, given_ in ((importance, importance), (torch.ones(K), None)):
        found = pack.quantize_w4(weight, group, given_)
        assert [x.dtype for x in found] == [torch.int8, torch.int8, torch.float32]
        assert [x.shape for x in found] == [(N, K), (N, -(-K // group)), (N,)]
        assert int(found[0].min()) >= -8
        assert int(found[0].max()) <= 7
        assert bool(((found[1].abs() >= 1) & (found[1].abs() <= 15)).all())
        floor = weighted(weight, plain(weight, group), group, weights)
        error = weighted(weight, found, group, weights)
        assert bool((error <= floor * (1 + 1e-5) + 1e-12 * size**2).all())


@pytest.mark.parametrize("group", GROUPS)
def test_the_kernel_searches_as_the_reference(isa: str, native: Any, group: int) -> None:
    """A weight between two integers, and two scales that lose the same, may fall to either side."""
    weight, importance = randn(37, 384) * randn(37, 1, seed=1).exp(), randn(384, seed=2).square()
    weight[3] = 0
    weight[4, :128] = 1e-20
    weight[5] = 0.25
    found = native.quantize_w4(weight, importance, group)
    wanted = pack.search_w4(weight, importance, group)
    assert [(x.dtype, x.shape) for x in found] == [(x.dtype, x.shape) for x in wanted]
    assert float((found[0] != wanted[0]).float().mean()) < 1e-3
    assert float((found[1] != wanted[1]).float().mean()) < 1e-2
    error, least = (weighted(weight, x, group, importance) for x in (found, wanted))
    torch.testing.assert_close(error, least, rtol=1e-4, atol=1e-12)
    alone = native.quantize_w4(weight[7:8], importance, group)
    assert all(torch.equal(a, b[7:8]) for a, b in zip(alone, found, strict=True))


def test_arguments_of_the_search_are_checked(native: Any) -> None:
    weight, importance = randn(5, 64), torch.ones(64)
    for bad in (randn(5, 63), randn(64), randn(5, 2, 32)):
        with pytest.raises(ValueError, match="not rows of whole groups of 32"):
            native.quantize_w4(bad, importance, 32)
    for bad in (weight.double(), weight.bfloat16(), randn(64, 5).T):
        with pytest.raises(ValueError, match="weight must be a contiguous float32 tensor"):
            native.quantize_w4(bad, importance, 32)
    for bad in (importance[1:], importance.double()):
        with pytest.raises(ValueError, match="importance must be a contiguous float32 tensor of 64"):
            native.quantize_w4(weight, bad, 32)
    for group in (0, -32, 48):
        with pytest.raises(ValueError, match="32, 64 or 128"):
            native.quantize_w4(weight, importance, group)
    assert native.quantize_w4(weight[:, :0], importance[:0], 32)[1].shape == (5, 0)
    assert native.quantize_w4(weight[:0], importance, 32)[1].shape == (0, 2)


def test_importance_lowers_the_error_that_it_weighs() -> None:
    weight, importance = randn(64, 256), torch.exp(2 * randn(256, seed=1))
    with_it = weighted(weight, pack.quantize_w4(weight, 32, importance), 32, importance).sum()
    without = weighted(weight, pack.quantize_w4(weight, 32), 32, importance).sum()
    assert with_it < 0.9 * without


def test_w4_beats_the_symmetric_range() -> None:
    """Against max|w| / 7, which most int4 formats take: about a fifth less error on normal weights."""
    weight = randn(64, 1024)
    scale = (weight.view(64, -1, 32).abs().amax(2) / 7).repeat_interleave(32, 1)
    common = (torch.round(weight / scale) * scale - weight).square().sum()
    assert weighted(weight, pack.quantize_w4(weight, 32), 32, torch.ones(1024)).sum() < 0.85 * common


@pytest.mark.parametrize("scheme", MADE)
def test_zeros_stay_zeros(scheme: str) -> None:
    weight = randn(70, 100)
    weight[3] = 0
    weight[4, :32] = 0
    wide = PackedLinear(weight, None, MADE[scheme]).wide_weight()
    assert not wide[3].any()
    assert not wide[4, :32].any()
    assert wide[4, 32:].any()


@pytest.mark.parametrize(
    ("scheme", "loss"), [("bf16", 3e-3), ("w8a8", 0.01), ("w4a8", 0.11), ("w4a16", 0.11)]
)
def test_wide_weight_is_near_the_weight(scheme: str, loss: float) -> None:
    weight = randn(70, 100)
    wide = PackedLinear(weight, None, MADE[scheme]).wide_weight()
    assert wide.shape == weight.shape
    assert float((wide - weight).norm() / weight.norm()) < loss


@pytest.mark.parametrize(
    ("features", "group", "depth"), [(1, 0, 64), (64, 0, 64), (65, 32, 128), (65, 128, 128)]
)
def test_padded_depth(features: int, group: int, depth: int) -> None:
    assert pack.padded_depth(features, group) == depth
