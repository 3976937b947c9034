"""Convolutions over channels-last images against float64: any size, window, stride, padding and layout."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from torchwright.hardware.kernels import conv

ERROR = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 8e-4}
"""Relative (Frobenius): float32 sums, results rounded to the type."""
SPLIT = 5e-5
"""The same of float32 as two in bfloat16: each factor is off by up to 2^-18, and as much is left out."""
ACTIVATIONS = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
}
CHANNELS = (2, 6, 16, 24, 50, 130)
"""Fewer than a vector, no multiple of one, some blocks and a rest."""
WINDOWS = ((1, 1), (3, 3), (5, 5), (7, 7), (3, 1), (2, 4))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def image(channels: int, window: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Of a random size that the window fits into, channels-last, plain, or a part of a larger one."""
    sizes = [random.randint(side, side + 17) for side in window]
    batch = random.randint(1, 3)
    wide = 3 * torch.randn(batch, channels + 2, *sizes, dtype=dtype)
    ways = (
        lambda: wide[:, :channels].contiguous(),
        lambda: wide[:, :channels].contiguous(memory_format=torch.channels_last),
        lambda: wide[:, 1 : channels + 1],
    )
    return random.choice(ways)()


def poison(like: torch.Tensor) -> None:
    """Leave NaN where the next result of this size may be put, so that what is not written shows."""
    torch.full_like(like, torch.nan)


def check(
    got: torch.Tensor, wanted: torch.Tensor, sums: torch.Tensor, dtype: torch.dtype, most: float | None = None
) -> None:
    """`sums` are what the activation was given: few of them may be left of it."""
    assert got.dtype == dtype
    assert got.shape == wanted.shape
    assert got.is_contiguous(memory_format=torch.channels_last)
    error = (got.double() - wanted).norm() / torch.maximum(wanted.norm(), sums.norm())
    assert float(error) <= (most or ERROR[dtype])


@pytest.mark.parametrize(
    ("dtype", "pairs"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True), (torch.float16, True)],
)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_dense_convolution(
    isa: str,
    native: Any,
    threads: int,
    window: tuple[int, int],
    name: str,
    dtype: torch.dtype,
    pairs: bool,
) -> None:
    for channels, features in ((random.choice(CHANNELS), random.choice((5, *CHANNELS))) for _ in range(2)):
        stride, padding = [random.randint(1, 2) for _ in window], [random.randrange(side) for side in window]
        x = image(channels, window, dtype)
        weight = (
            torch.randn(features, channels, *window, dtype=dtype) / (channels * window[0] * window[1]) ** 0.5
        )
        bias = torch.randn(features) if random.random() < 0.7 else None
        scale, given = None, x.double()
        if window == (1, 1) and stride == [1, 1]:
            scale = torch.rand(len(x), channels, 1, 1)
            given = given * scale
        exact = F.conv2d(given, weight.double(), None if bias is None else bias.double(), stride, padding)
        more = torch.randn(exact.shape, dtype=dtype) if random.random() < 0.5 else None
        wanted = ACTIVATIONS[name](exact) + (0 if more is None else more.double())
        poison(exact.to(dtype))
        packed = (conv.pack_pairs if pairs else conv.pack_dense)(weight), conv.pack_bias(bias, features)
        got = native.conv_dense(x, *packed, list(window), stride, padding, features, name, more, scale)
        check(got, wanted, exact, dtype, SPLIT if pairs and dtype == torch.float32 else None)


@pytest.mark.parametrize("dtype", list(ERROR))
def test_the_mean_of_an_image(isa: str, native: Any, threads: int, dtype: torch.dtype) -> None:
    for channels in (1, 16, *CHANNELS):
        x = image(channels, (1, 1), dtype)
        wanted = x.double().mean((2, 3), keepdim=True)
        got = native.image_mean(x)
        assert got.shape == wanted.shape
        assert got.dtype == dtype
        size = x.double().abs().mean((2, 3), keepdim=True)
        assert float(((got.double() - wanted).abs() / size).max()) <= ERROR[dtype]
        assert torch.equal(native.image_mean(x[-1:]), got[-1:])
    assert native.image_mean(torch.randn(0, 5, 3, 3)).shape == (0, 5, 1, 1)
    with pytest.raises(ValueError, match="no pixel"):
        native.image_mean(torch.randn(1, 5, 0, 3))


@pytest.mark.parametrize("shape", [(5, 3, 3, 3), (16, 32, 1, 1), (37, 6, 2, 4), (130, 50, 1, 1)])
def test_packed_weights_are_those_that_were_packed(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    assert torch.equal(conv.unpack_dense(conv.pack_dense(weight), weight.shape), weight)
    narrow = weight.bfloat16()
    assert torch.equal(conv.unpack_pairs(conv.pack_pairs(narrow), weight.shape, torch.bfloat16), narrow)
    half = weight.half()
    assert torch.equal(conv.unpack_pairs(conv.pack_pairs(half), weight.shape, torch.float16), half)
    split = conv.unpack_pairs(conv.pack_pairs(weight), weight.shape, torch.float32)
    assert ((split - weight).abs() <= 2.0**-17 * weight.abs()).all()


@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_depthwise_convolution(
    isa: str, native: Any, threads: int, window: tuple[int, int], name: str, dtype: torch.dtype
) -> None:
    for channels in (16, random.choice((17, 24, 50, 130))):
        stride, padding = [random.randint(1, 2)] * 2, [random.randrange(side) for side in window]
        x = image(channels, window, dtype)
        weight = torch.randn(channels, 1, *window) / (window[0] * window[1]) ** 0.5
        bias = torch.randn(channels)
        exact = F.conv2d(x.double(), weight.double(), bias.double(), stride, padding, groups=channels)
        poison(exact.to(dtype))
        packed = conv.pack_depthwise(weight), conv.pack_bias(bias, channels)
        got = native.conv_depthwise(x, *packed, list(window), stride, padding, name)
        check(got, ACTIVATIONS[name](exact), exact, dtype)


def test_not_a_number_stays_where_it_is_seen(isa: str, native: Any) -> None:
    x = torch.randn(1, 16, 9, 9)
    x[0, 3, 4, 4] = torch.nan
    bias, sizes = torch.zeros(16), ([1, 1], [1, 1], [0, 0])
    for name in ACTIVATIONS:
        for pack in (conv.pack_dense, conv.pack_pairs):
            y = native.conv_dense(x, pack(torch.randn(16, 16, 1, 1)), bias, *sizes, 16, name, None)
            assert torch.equal(y.isnan()[0, 0], x.isnan()[0, 3]), name
        deep = conv.pack_depthwise(torch.randn(16, 1, 3, 3))
        z = native.conv_depthwise(x, deep, bias, [3, 3], [1, 1], [1, 1], name)
        assert z.isnan().sum() == 9, name
        assert z[0, 3, 3:6, 3:6].isnan().all(), name


@pytest.mark.parametrize("pack", [conv.pack_dense, conv.pack_pairs])
def test_an_image_alone_gives_the_bits_that_it_gives_in_a_batch(
    isa: str, native: Any, threads: int, pack: Any
) -> None:
    x, bias = torch.randn(5, 24, 11, 13), torch.randn(40)
    dense = pack(torch.randn(40, 24, 1, 1))
    deep = conv.pack_depthwise(torch.randn(24, 1, 5, 5))

    def run(images: torch.Tensor) -> torch.Tensor:
        y = native.conv_depthwise(images, deep, bias[:24], [5, 5], [1, 1], [2, 2], "silu")
        return native.conv_dense(y, dense, bias, [1, 1], [1, 1], [0, 0], 40, "hardswish", None)

    assert torch.equal(run(x)[3:4], run(x[3:4]))


def test_no_image_and_sizes_that_do_not_fit(native: Any) -> None:
    weight, bias, one = conv.pack_dense(torch.randn(16, 16, 3, 3)), torch.zeros(16), [1, 1]
    deep = conv.pack_depthwise(torch.randn(16, 1, 3, 3))

    def dense(x: torch.Tensor, window: list[int] = [3, 3], padding: list[int] = one, more: Any = None) -> Any:  # noqa: B006
        return native.conv_dense(x, weight, bias, window, one, padding, 16, "none", more)

    assert dense(torch.randn(0, 16, 8, 8)).shape == (0, 16, 8, 8)
    with pytest.raises(ValueError, match="smaller than the window"):
        dense(torch.randn(1, 16, 2, 2), padding=[0, 0])
    with pytest.raises(ValueError, match="wider than their padding"):
        dense(torch.randn(1, 16, 8, 8), padding=[3, 3])
    with pytest.raises(ValueError, match="packed weight has"):
        dense(torch.randn(1, 17, 8, 8))
    with pytest.raises(ValueError, match="packed weight has"):
        dense(torch.randn(1, 16, 8, 8), window=[1, 1], padding=[0, 0])
    with pytest.raises(ValueError, match=r"is not \(batch"):
        dense(torch.randn(16, 8, 8))
    with pytest.raises(ValueError, match="residual is"):
        dense(torch.randn(1, 16, 8, 8), more=torch.randn(1, 16, 8, 7))
    with pytest.raises(TypeError, match="float32 both, or bfloat16 weights"):
        dense(torch.randn(1, 16, 8, 8).bfloat16())
    with pytest.raises(ValueError, match="packed weight has"):
        native.conv_dense(
            torch.randn(1, 16, 8, 8), weight.bfloat16(), bias, [3, 3], one, one, 16, "none", None
        )
    with pytest.raises(ValueError, match="1x1 windows"):
        native.conv_dense(
            torch.randn(1, 16, 8, 8), weight, bias, [3, 3], one, one, 16, "none", None, torch.rand(1, 16)
        )
    with pytest.raises(ValueError, match="at least"):
        native.conv_depthwise(torch.randn(1, 8, 8, 8), deep, bias, [3, 3], one, one, "none")
    with pytest.raises(ValueError, match="bias"):
        native.conv_depthwise(torch.randn(1, 16, 8, 8), deep, bias[:8], [3, 3], one, one, "none")


def test_float16_rounds_as_pytorch_does(isa: str, native: Any) -> None:
    """Every value, through the mean of images of one pixel; and those between two, to the even one."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    x = every[~every.isnan()].view(1, -1, 1, 1)
    assert torch.equal(
        native.image_mean(x).view(torch.int16), (x + 0.0).view(torch.int16) | (x == 0).short() * 0
    )
    wide = (torch.randn(1, 16, 200, 300) * 2.0 ** torch.randint(-30, 18, (1, 16, 200, 300))).half()
    weight, bias = conv.pack_depthwise(torch.full((16, 1, 1, 1), 1 / 3)), conv.pack_bias(None, 16)
    got = native.conv_depthwise(wide, weight, bias, [1, 1], [1, 1], [0, 0], "none")
    assert torch.equal(got, (wide.float() * torch.tensor(1 / 3)).half())
