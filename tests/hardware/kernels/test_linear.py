"""Packed linear layers: the compiled kernels against float64, the same bits in every batch, wrong arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from torchwright.core.scheme import BF16, FP8, GROUPS, INTEGERS, MADE, MXFP4, W4BF16, Scheme, scheme_of
from torchwright.hardware.kernels import ops, pack_grouped
from torchwright.hardware.kernels.head_linears import HeadLinears
from torchwright.hardware.kernels.linear import PackedForm, PackedLinear
from torchwright.hardware.kernels.pack_floats import LEAST, MOST, packable
from torchwright.hardware.kernels.pack_grouped import Layout
from torchwright.hardware.kernels.reference import LEVELS_8, LEVELS_16
from torchwright.hub.weight import SmallFloats

GROUPED = [*[(scheme, 32) for scheme in ("bf16", "w8a8")]] + [
    (scheme, group) for scheme in ("w4a8", "w4a16") for group in GROUPS
]
"""Each scheme with each group size that means something to it."""
SHAPES = [(1, 1), (16, 64), (37, 17), (64, 128), (65, 63), (100, 200), (130, 321)]
"""Output and input features, most of them full panels, groups or lanes of nothing."""
TOLERANCE = {"bf16": 2e-6, "w8a8": 1e-6, "w4a8": 1e-6, "w4a16": 1e-6}
"""Of the sum of the products' magnitudes."""
ROWS = [*range(1, 36), 47, 64, 65, 193, 385, 511, 512]
"""Every size of a tile, every rest of one, and the edges of the blocks that threads share."""


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(scheme: str, N: int, K: int, group: int = 32, *, bias: bool = True, seed: int = 0) -> PackedLinear:
    weight = randn(N, K, seed=seed) / K**0.5
    return PackedLinear(weight, randn(N, seed=seed + 1) if bias else None, scheme_of(scheme, group))


def exact(layer: PackedLinear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's float64 result on activations rounded as its scheme rounds them, and its sum of magnitudes."""
    if layer.scheme.name == "bf16":
        rounded = x.bfloat16().double()
    else:
        wide, levels = x.float(), LEVELS_16 if layer.scheme.name == "w4a16" else LEVELS_8
        peak = wide.abs().amax(-1, keepdim=True)
        step = torch.where(peak > 0, torch.tensor(float(levels)) / peak, 0)
        rounded = torch.round(wide * step).double() * (peak.double() / levels)
    weight = layer.wide_weight().double()
    bias = torch.zeros(layer.out_features).double() if layer.bias is None else layer.bias.double()
    y = nn.functional.linear(rounded, weight, bias)
    return y, nn.functional.linear(rounded.abs(), weight.abs(), bias.abs())


def check(layer: PackedLinear, x: torch.Tensor) -> None:
    wanted, size = exact(layer, x)
    allowed = TOLERANCE[layer.scheme.name] * size
    if x.dtype == torch.bfloat16:
        allowed += 2**-8 * wanted.abs()
    for y in (layer(x), layer.reference(x)):
        assert y.dtype == x.dtype
        assert y.shape == (*x.shape[:-1], layer.out_features)
        excess = (y.double() - wanted).abs() - allowed
        assert not excess.numel() or float(excess.max()) <= 0, (
            f"{(excess / allowed).max() + 1} x the tolerance"
        )


def call(native: Any, layer: PackedLinear, x: torch.Tensor, **changed: Any) -> torch.Tensor:
    """The operator as the layer calls it, with some arguments changed."""
    arguments = {"weight": layer.packed, "bias": layer.bias, "features": layer.out_features}
    if layer.scheme.name != "bf16":
        arguments["scale"] = layer.scale
    if layer.scheme.name.startswith("w4"):
        arguments["group_size"] = layer.scheme.group
    return getattr(native, f"linear_{layer.scheme.name}")(x, **{**arguments, **changed})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scheme", "group"), GROUPED)
def test_against_float64(isa: str, scheme: str, group: int, dtype: torch.dtype) -> None:
    for N, K in SHAPES:
        for bias in (True, False):
            layer = make(scheme, N, K, group, bias=bias, seed=N + K)
            for shape in [(0,), (1,), (2,), (7,), (2, 3), (2, 0), ()]:
                check(layer, randn(*shape, K, seed=sum(shape)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scheme", "group"), GROUPED)
def test_rows_do_not_depend_on_each_other(isa: str, scheme: str, group: int, dtype: torch.dtype) -> None:
    """To the bit: a row in any number of rows, in chunks of any size, and alone."""
    layer = make(scheme, 140, 136, group)
    x = (randn(512, 136, seed=2) * randn(512, 1, seed=3).exp()).to(dtype)
    whole = layer(x)
    for rows in ROWS:
        assert torch.equal(layer(x[-rows:]), whole[-rows:]), f"the last {rows} rows"
    for chunk in (16, 100):
        assert torch.equal(torch.cat([layer(part) for part in x.split(chunk)]), whole), f"chunks of {chunk}"
    for row in (0, 1, 191, 192, 256, 511):
        assert torch.equal(layer(x[row]), whole[row]), f"row {row} alone"
    assert torch.equal(layer(x.view(8, 64, 136)).flatten(0, 1), whole)


def test_threads_do_not_change_a_bit(isa: str) -> None:
    x = randn(200, 200)
    layers = [make(scheme, 300, 200) for scheme in MADE]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [layer(x) for layer in layers]
        torch.set_num_threads(3)
        assert all(torch.equal(layer(x), y) for layer, y in zip(layers, alone, strict=True))
    finally:
        torch.set_num_threads(threads)


def random_integers(scheme: Scheme, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers, scales as float16 has them, and zeros."""
    top, random = 2**scheme.weight_bits, torch.Generator().manual_seed(N + K)
    integers = torch.randint(0, top, (N, K), generator=random, dtype=torch.uint8)
    scale = (randn(N, -(-K // (scheme.group or 1))) / 50).half().float()
    return integers, scale, torch.randint(0, top, scale.shape, generator=random)


@pytest.mark.parametrize("group", W4BF16.groups)
@pytest.mark.parametrize("scheme", INTEGERS)
def test_kept_integers_give_the_bits_of_their_bfloat16(isa: str, scheme: str, group: int) -> None:
    for N, K in [*SHAPES, (140, 136)]:
        integers, scale, zeros = random_integers(scheme_of(scheme, group), N, K)
        layer = PackedLinear.from_groups(integers, scale, -zeros * scale, randn(N), scheme_of(scheme, group))
        each = [part.repeat_interleave(group, 1)[:, :K] for part in (zeros, scale)]
        wide = (integers.double() - each[0]) * each[1]
        assert torch.equal(layer.wide_weight(), wide.bfloat16().float())
        plain = PackedLinear(wide, randn(N), BF16)
        for rows in (0, 1, 2, 5, 6, 7, 33, 130):
            x = randn(rows, K, seed=rows)
            assert torch.equal(layer(x), plain(x)), f"{rows} rows of {N} x {K}"
    form = PackedForm(scheme=scheme_of(scheme, group), in_features=K, out_features=N)
    assert replace(layer.form, layout=Layout.LANES) == form
    tiles = scheme == "w4bf16" and group >= pack_grouped.STEP and ops.native.reads_tiles()
    assert bool(layer.form.layout) == tiles
    with pytest.raises(ValueError, match="are not those of"):
        PackedLinear.from_packed(form, {"packed": layer.packed[1:]})


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Compare zeros by their signs; a NaN is any NaN."""
    nan = found.isnan()
    kind = torch.int16 if found.dtype == torch.bfloat16 else torch.int32
    bits = found.view(kind), wanted.view(kind)
    return torch.equal(nan, wanted.isnan()) and bool((nan | (bits[0] == bits[1])).all())


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("group", GROUPS)
def test_kept_integers_at_every_count_of_tiles(isa: str, group: int, short: bool) -> None:
    """One, two and many tiles of tokens, the last one full or not; numbers that are none, and those near the least."""
    scheme, N, K = (
        scheme_of("w4bf16", group),
        140,
        1024 + 72,
    )  # more steps than are widened at a time, and a part
    integers, scale, zeros = random_integers(scheme, N, K)
    offset = -zeros * scale
    if not short:
        scale[3, 0], scale[17, 1], scale[64], scale[139, -1] = torch.inf, torch.nan, 2.0**-130, 0
        offset[5, 1], offset[6] = -torch.inf, 0.3
    layer = PackedLinear.from_groups(integers, scale, offset, randn(N), scheme)
    tiles = Layout.SHORT_TILES if short else Layout.TILES
    assert layer.form.layout == (tiles if ops.native.reads_tiles() else Layout.LANES)
    assert ops.native.reads_tiles() or isa != "amx"
    each = [part.repeat_interleave(group, 1)[:, :K] for part in (scale, offset)]
    plain = PackedLinear(integers * each[0] + each[1], randn(N), BF16)
    x = randn(600, K, seed=group)
    x[0, 3], x[15, 40], x[16, K - 1], x[33] = torch.nan, torch.inf, -torch.inf, 2.0**-129
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 2, 4, 5, 15, 16, 17, 31, 32, 33, 48, 49, 100, 600):
            found = x[:rows].to(dtype)
            wanted = plain(found)
            del [torch.full((rows, N), torch.nan, dtype=dtype)][:]  # what the output's memory may have held
            assert same_bits(layer(found), wanted), f"{rows} rows"


@pytest.mark.parametrize("group", GROUPS)
def test_integers_are_laid_out_again_for_other_processors(isa: str, group: int) -> None:
    scheme = scheme_of("w4bf16", group)
    for N, K, shift in ((1, 1, 0), (70, 200, 0), (130, 384, 0.25)):
        integers, scale, zeros = random_integers(scheme, N, K)
        numbers, bias, x = (integers, scale, shift - zeros * scale), randn(N), randn(3, K)
        wanted = PackedLinear.from_groups(*numbers, bias, scheme)
        for layout in Layout:
            if shift and layout == Layout.SHORT_TILES:
                continue  # they have no such offsets
            packed = pack_grouped.pack_grouped(numbers, scheme, layout)
            found = pack_grouped.unpack_grouped(packed, N, wanted.form.depth, scheme, layout)
            for part, number in zip(found, numbers, strict=True):
                assert torch.equal(part[:, : number.shape[1]], number)
                assert not part[:, number.shape[1] :].any()
            form = PackedForm(scheme=scheme, in_features=K, out_features=N, layout=layout)
            assert PackedForm.from_dict(form.as_dict()) == form
            layer = PackedLinear.from_packed(form, {"packed": packed, "bias": bias})
            assert layer(x).equal(wanted(x))
            assert layer.wide_weight().equal(wanted.wide_weight())
            assert bool(layer.form.layout) == bool(wanted.form.layout)
            again, _ = pack_grouped.repack_here(packed, form.depth, scheme, layout)
            assert again.equal(wanted.packed)
            with pytest.raises(ValueError, match="are not those of"):
                PackedLinear.from_packed(form, {"packed": packed[:-1], "bias": bias})


def test_short_heads_are_for_numbers_that_they_hold(native: Any) -> None:
    if not native.reads_tiles():
        pytest.skip("this processor has no tiles")
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    for scale, offset, short in (
        (one, -15 * one, True),
        (zero, zero, True),
        (one * 2**-24, -255 * one * 2**-24, True),
        (one, one, False),
        (one, -256 * one, False),
        (one, one / 2, False),
        (zero, one, False),
        (one * (1 + 2**-11), zero, False),
        (one * 1e30, zero, False),
        (one * torch.inf, zero, False),
        (one * torch.nan, zero, False),
        (one, -one * torch.inf, False),
    ):
        layout = pack_grouped.layout_here(W4BF16, scale, offset)
        assert layout == (Layout.SHORT_TILES if short else Layout.TILES), f"{scale} {offset}"


def test_tiles_are_refused_where_there_are_none(native: Any) -> None:
    if not native.reads_tiles():
        pytest.skip("this processor has no tiles")
    layer, before = PackedLinear.from_groups(*random_integers(W4BF16, 70, 96), None, W4BF16), native.isa()
    try:
        native.use_isa("avx2")
        assert not native.reads_tiles()
        with pytest.raises(ValueError, match=r"packed for processors with AMX.*avx2"):
            layer(randn(3, 96))
    finally:
        native.use_isa(before)


def test_only_integers_of_four_bits_have_tiles(native: Any) -> None:
    x, nothing = torch.zeros(1, 32), torch.zeros(0, dtype=torch.uint8)
    for bits, group, floats, layout in (
        *((8, 32, False, 1), (4, 16, False, 1), (4, 32, True, 2)),
        *((4, 32, False, 3), (4, 32, False, -1)),
    ):
        with pytest.raises(ValueError, match=f"layout is {layout}"):
            native.linear_grouped(x, nothing, None, 64, group, bits, floats, layout)
    for scheme, layout in (("w8bf16", 1), ("bf16", 1), ("mxfp4", 2), ("w4bf16", "yes"), ("w4bf16", 3)):
        data = {"scheme": scheme, "in_features": 64, "out_features": 64, "group_size": 32, "layout": layout}
        with pytest.raises(ValueError, match=r"layout|Layout"):
            PackedForm.from_dict(data)


def random_floats(scheme: Scheme, N: int, K: int, seed: int) -> SmallFloats:
    """Every bit pattern of the type but NaN, with scales of three orders of magnitude."""
    random, groups = torch.Generator().manual_seed(seed), -(-K // (scheme.group or 1))
    codes = torch.randint(0, 1 << scheme.weight_bits, (N, K), generator=random, dtype=torch.uint8)
    if scheme.weight_bits == 4:
        scales = torch.randint(112, 122, (N, groups), generator=random, dtype=torch.uint8)
    else:
        codes[codes & 127 == 127] = 0
        scales = randn(N, groups, seed=seed).exp() / 300
    return SmallFloats(codes_NK=codes, scales_NG=scales, bits=scheme.weight_bits)


@pytest.mark.parametrize("scheme", [MXFP4, *(scheme_of(FP8.name, group) for group in FP8.groups)], ids=str)
def test_kept_floats_give_the_bits_of_their_bfloat16(isa: str, scheme: Scheme) -> None:
    group = scheme.group or 1
    for N, K in [*SHAPES, (140, 136), (64, 512)]:
        floats = random_floats(scheme, N, K, N + K)
        assert packable(floats)
        layer = PackedLinear.from_floats(floats, randn(N), scheme)
        if scheme.weight_bits == 4:
            numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(floats.codes_NK & 7).long()]
            numbers = torch.where(floats.codes_NK > 7, -numbers, numbers)
            scales = 2.0 ** (floats.scales_NG.float() - 127)
        else:
            numbers, scales = floats.codes_NK.view(torch.float8_e4m3fn).float(), floats.scales_NG
        wide = numbers * scales.repeat_interleave(group, 1)[:, :K]
        assert torch.equal(layer.wide_weight(), wide.bfloat16().float())
        plain = PackedLinear(wide, randn(N), BF16)
        for rows in (0, 1, 2, 5, 6, 7, 33, 130):
            x = randn(rows, K, seed=rows)
            assert torch.equal(layer(x), plain(x)), f"{rows} rows of {N} x {K}"
            torch.testing.assert_close(layer.reference(x), plain.reference(x))
    form = PackedForm(scheme=scheme, in_features=K, out_features=N)
    assert layer.form == form
    with pytest.raises(ValueError, match="are not those of"):
        PackedLinear.from_packed(form, {"packed": layer.packed[1:]})


@pytest.mark.parametrize("scale", [2.0**-130, 2.0**-100, 3.1e-5, 1.0, 0.37, 1e30])
def test_floats_with_one_scale_for_all_features(isa: str, scale: float) -> None:
    """Every number of the type, by the path for whole blocks or, at the ends of bfloat16, the other."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(70, 1)
    codes[codes & 127 == 127] = 0
    scales = torch.tensor([[scale, scale * 1.9]]).repeat(70, 1)
    floats = SmallFloats(codes_NK=codes, scales_NG=scales, bits=8)
    assert packable(floats)
    layer = PackedLinear.from_floats(floats, None, scheme_of("fp8", 128))
    assert torch.equal(layer(torch.eye(256)), PackedLinear(floats.wide(128), None, BF16)(torch.eye(256)))


def test_floats_at_the_ends_of_their_ranges(isa: str) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(64, 2)
    for exponent, fits in ((0, False), (LEAST, True), (MOST, True), (MOST + 1, False), (255, False)):
        scales = torch.full((64, 1), exponent, dtype=torch.uint8)
        floats = SmallFloats(codes_NK=codes, scales_NG=scales, bits=4)
        assert packable(floats) == fits
        if fits:
            layer = PackedLinear.from_floats(floats, None, MXFP4)
            wide = PackedLinear(floats.wide(32), None, BF16)
            x = torch.eye(32)  # one weight a row: no sum overflows
            assert torch.equal(layer(x), wide(x))
    every = torch.arange(256, dtype=torch.uint8).repeat(2, 1)
    ones = torch.ones(2, 2)
    assert not packable(SmallFloats(codes_NK=every, scales_NG=ones, bits=8))
    numbers = torch.where(every & 127 == 127, 0, every)
    assert packable(SmallFloats(codes_NK=numbers, scales_NG=ones, bits=8))
    assert not packable(SmallFloats(codes_NK=numbers, scales_NG=ones * 1e38, bits=8))
    layer = PackedLinear.from_floats(
        SmallFloats(codes_NK=numbers, scales_NG=ones, bits=8), None, scheme_of("fp8", 128)
    )
    assert torch.equal(layer(torch.eye(256))[:, 0], numbers[0].view(torch.float8_e4m3fn).float())


def test_each_head_has_a_weight_of_its_own(isa: str) -> None:
    for H, N, K in ((1, 1, 1), (3, 20, 24), (4, 65, 130)):
        weight = (randn(H, N, K) / K**0.5).bfloat16()
        layer = HeadLinears(weight, device=torch.device("cpu"))
        assert layer.packed is not None
        whole = layer(x := randn(600, H, K).bfloat16())
        for head in range(H):
            assert torch.equal(whole[:, head], PackedLinear(weight[head], None, BF16)(x[:, head]))
        for rows in (0, 1, 2, 7, 33):
            assert torch.equal(layer(x[:rows]), whole[:rows])
        again = HeadLinears.from_tensors(N, layer.packed, None)
        assert torch.equal(again(x), whole)
        wide = HeadLinears(weight.float(), device=torch.device("cpu"))(x.float())
        torch.testing.assert_close(whole.float(), wide, rtol=2**-7, atol=1e-2)
    with pytest.raises(ValueError, match="not \\(tokens, heads, features\\)"):
        layer(x[:, :1])
    with pytest.raises(ValueError, match="packed weight has"):
        layer(x[..., :60])


def test_no_weight_is_rounded_to_a_scheme_of_kept_numbers() -> None:
    with pytest.raises(ValueError, match="numbers that were chosen elsewhere"):
        PackedLinear(randn(64, 64), None, W4BF16)


def test_wrong_kept_integers_are_refused(native: Any) -> None:
    packed, x = torch.zeros(64 * (8 + 16), dtype=torch.uint8), torch.zeros(1, 32)
    for bits, group, message in (
        (3, 32, "bits is 3"),
        (4, 8, "group_size is 8"),
        (4, 32, "packed weight has"),
    ):
        for layout in range(3 if (bits, group) == (4, 32) else 1):
            with pytest.raises(ValueError, match=message):
                native.linear_grouped(x, packed, None, 64, group, bits, False, layout)


@pytest.mark.parametrize("scheme", MADE)
def test_strides_do_not_matter(native: Any, scheme: str) -> None:
    layer, x = make(scheme, 70, 96), randn(96, 5).T
    assert torch.equal(layer(x), layer(x.contiguous()))
    assert torch.equal(layer(randn(5, 192)[:, ::2]), layer(randn(5, 192)[:, ::2].contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", MADE)
def test_extremes(isa: str, scheme: str, dtype: torch.dtype) -> None:
    """Rows of huge and of tiny values, an outlier among small ones, and zeros that give the bias."""
    layer = make(scheme, 70, 200)
    x = randn(6, 200, seed=4)
    x[0] *= 1e30
    x[1] *= 1e-30
    x[2] *= 1e-3
    x[2, 77] = 1e4
    x[3] = 0
    x[4] = -0.0
    x[5] = torch.where(x[5] > 0, 3.0, -3.0)
    x = x.to(dtype)
    check(layer, x)
    assert layer.bias is not None
    assert torch.equal(layer(x[3:5]), layer.bias.to(dtype).expand(2, -1))


@pytest.mark.parametrize("scheme", MADE)
def test_rows_too_small_to_scale_are_zeros(isa: str, scheme: str) -> None:
    """127 / max|x| has no float32 below 3.7e-37: such rows must not become NaN or integers without meaning."""
    layer, x = make(scheme, 70, 200, bias=False), randn(3, 200) * torch.tensor([[1e-37], [1e-39], [1e-44]])
    for y in (layer(x), layer.reference(x)):
        assert bool((y.abs() <= 1e-34).all())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scheme", MADE)
def test_sums_have_room(isa: str, scheme: str, sign: int) -> None:
    """All products at their largest and of one sign, over a long row."""
    weight = torch.ones(66, 16384)
    weight[1::2] = -1
    check(PackedLinear(weight, None, scheme_of(scheme, 128)), torch.full((3, 16384), float(sign)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", MADE)
def test_what_is_not_a_number_stays_so(isa: str, scheme: str, dtype: torch.dtype, bad: float) -> None:
    """A fault upstream shows in all of its row, wherever it stands, and in no other row."""
    layer, x = make(scheme, 70, 200), randn(6, 200).to(dtype)
    clean = layer(x)
    places = {1: 0, 2: 15, 4: 199}
    for row, at in places.items():
        x[row, at] = bad
    y = layer(x)
    for row in range(6):
        if row in places:
            assert not y[row].isfinite().any()
        else:
            assert torch.equal(y[row], clean[row])


@pytest.mark.parametrize("scheme", MADE)
def test_float64_takes_the_reference(scheme: str) -> None:
    layer, x = make(scheme, 70, 96), randn(3, 96).double()
    assert layer(x).dtype == torch.float64
    assert torch.equal(layer(x), layer.reference(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scheme", MADE)
def test_rows_of_another_width_are_refused(scheme: str, dtype: torch.dtype) -> None:
    """Also one that the padding of the packed weight would swallow."""
    layer = make(scheme, 16, 40)
    for width in (1, 39, 41, 64, 128):
        with pytest.raises(ValueError, match=f"{width} features.*40"):
            layer(torch.zeros(2, width, dtype=dtype))


@pytest.mark.parametrize("scheme", MADE)
def test_arguments_are_checked(native: Any, scheme: str) -> None:
    layer, x = make(scheme, 70, 96), randn(3, 96)
    assert call(native, layer, x).shape == (3, 70)
    packed = layer.packed

    def refused(
        kind: type[Exception] | tuple[type[Exception], ...], match: str, x: torch.Tensor = x, **changed: Any
    ):
        with pytest.raises(kind, match=match):
            call(native, layer, x, **changed)

    refused(TypeError, "float32 or bfloat16", x.to(torch.int8))
    refused(TypeError, "float32 or bfloat16", x.double())
    refused(TypeError, "float32 or bfloat16", x.half())
    refused(ValueError, "features in its last", x[:, :0])
    refused(ValueError, "features in its last", torch.tensor(1.0))
    refused(ValueError, "packed weight has", torch.zeros(3, 200))
    refused(ValueError, "packed weight has", weight=packed[:-1])
    refused(ValueError, "packed weight has", weight=packed[:0])
    refused(ValueError, "packed weight has", weight=packed.view(torch.int8))
    refused(ValueError, "packed weight has", weight=torch.zeros(2 * len(packed), dtype=torch.uint8)[::2])
    refused(ValueError, "packed weight has", features=200)
    refused(ValueError, "packed weight has", features=0)
    refused((ValueError, RuntimeError), "negative|packed weight has", features=-1)
    refused((ValueError, RuntimeError), "overflow|packed weight has", features=2**62)
    refused(ValueError, "bias must be", bias=torch.zeros(69))
    refused(ValueError, "bias must be", bias=torch.zeros(70, dtype=torch.bfloat16))
    refused(ValueError, "bias must be", bias=torch.zeros(140)[::2])
    if scheme != "bf16":
        refused(ValueError, "scale must be", scale=torch.ones(70))
        refused(ValueError, "scale must be", scale=torch.ones(128, dtype=torch.float64))
    if scheme.startswith("w4"):
        for group in (0, -32, 48, 256):
            refused(ValueError, "32, 64 or 128", group_size=group)
        refused(ValueError, "packed weight has", group_size=64)


@pytest.mark.parametrize(("scheme", "group"), GROUPED)
def test_packed_tensors_make_the_layer_again(scheme: str, group: int) -> None:
    layer = make(scheme, 70, 200, group)
    again = PackedLinear.from_packed(layer.form, dict(layer.named_buffers()))
    assert torch.equal(again(randn(3, 200)), layer(randn(3, 200)))
    assert again.form == layer.form


@pytest.mark.parametrize("scheme", MADE)
def test_packed_tensors_must_fit(scheme: str) -> None:
    layer = make(scheme, 70, 200)
    tensors, form = dict(layer.named_buffers()), layer.form

    def refused(found: dict[str, torch.Tensor] = tensors, **changed: Any) -> None:
        values = {"scheme": scheme, "in_features": 200, "out_features": 70, "group_size": 32}
        assert values == form.as_dict()
        with pytest.raises(ValueError, match=r"tensors|scheme|group_size|features"):
            PackedLinear.from_packed(PackedForm.from_dict({**values, **changed}), found)

    refused(out_features=129)
    refused(out_features=71)  # the bias
    refused(out_features=-70)
    refused(in_features=257)
    refused(in_features=0)
    refused(scheme="w5")
    refused({"packed": tensors["packed"][:0]}, scheme="w5", out_features=0)
    refused(scheme="w8a8" if scheme != "w8a8" else "bf16")
    if scheme.startswith("w4"):
        refused(group_size=64)
        refused(group_size=0)
    refused({name: tensor for name, tensor in tensors.items() if name != "packed"})
    refused({**tensors, "other": tensors["packed"]})
    refused({**tensors, "packed": tensors["packed"][1:]})
    refused({**tensors, "packed": tensors["packed"].view(torch.int8)})
    refused({**tensors, "bias": torch.zeros(70, dtype=torch.bfloat16)})
    if scheme == "w8a8":
        refused({name: tensor for name, tensor in tensors.items() if name != "scale"})
        refused({**tensors, "scale": torch.ones(70)})


def test_schemes_and_groups_are_named() -> None:
    with pytest.raises(ValueError, match="bf16, w8a8, w4a8, w4a16"):
        make("w2a8", 16, 64)
    with pytest.raises(ValueError, match="32, 64, 128"):
        make("w4a8", 16, 64, 48)
