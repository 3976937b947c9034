"""LayerNorm and RMSNorm with gradients: the compiled kernels against PyTorch's own in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchwright.hardware.kernels import norm, ops

RELATIVE = {torch.float32: 4e-6, torch.bfloat16: 2**-8 + 4e-6}
SHAPES = [(1, 1), (3, 15), (5, 16), (2, 3, 33), (70, 48), (130, 1031)]
"""Widths of less than a vector, with and without a rest; 130 rows are three blocks of sums."""


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(found: torch.Tensor, wanted: torch.Tensor, atol: float = 4e-6) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=RELATIVE[found.dtype], atol=atol, equal_nan=True)


def of_torch(
    kind: str, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """The norm in float64."""
    if kind == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def ours(kind: str, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    if kind == "layer" and x.dtype == torch.float32:  # which `layer_norm` leaves to PyTorch
        return norm._Norm.apply(x, norm._single(weight), norm._single(bias), 1e-5, True)
    return norm.layer_norm(x, weight, bias, 1e-5) if kind == "layer" else norm.rms_norm(x, weight, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["rms", "rms alone", "layer", "layer without bias", "layer alone"])
@pytest.mark.parametrize("shape", SHAPES)
def test_result_and_gradients(isa: str, shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    kind, _, without = kind.partition(" ")
    x = (3 * randn(*shape) + 0.5).to(dtype)
    weight = None if without == "alone" else 1 + randn(shape[-1], seed=1)
    bias = randn(shape[-1], seed=2) if kind == "layer" and not without else None
    grad = randn(*shape, seed=3).to(dtype)
    inputs = [x, *(one for one in (weight, bias) if one is not None)]
    wide = [one.double().requires_grad_() for one in inputs]
    for one in inputs:
        one.requires_grad_()

    wanted = of_torch(kind, *[*wide, None, None][:3])
    found = ours(kind, x, weight, bias)
    assert (found.dtype, found.shape) == (dtype, x.shape)
    assert isinstance(found.grad_fn, norm._Norm._backward_cls)  # type: ignore[attr-defined]
    close(found, wanted)
    gradients = torch.autograd.grad(found, inputs, grad)
    for gradient, exact in zip(gradients, torch.autograd.grad(wanted, wide, grad.double()), strict=True):
        # A row's gradient is a difference of larger numbers, a weight's a sum over rows.
        close(gradient, exact, atol=2e-5 * max(1.0, float(exact.abs().max())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_rows_do_not_influence_each_other(isa: str, kind: str, dtype: torch.dtype) -> None:
    x, grad, weight = randn(9, 100).to(dtype), randn(9, 100, seed=1).to(dtype), randn(100, seed=2)
    poisoned, bad = x.clone(), grad.clone()
    poisoned[[0, 3, 8]] = torch.tensor([float("nan"), float("inf"), 1e30])[:, None].to(dtype)
    bad[5] = float("nan")

    def run(rows: torch.Tensor, along: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = rows.clone().requires_grad_()
        out = ours(kind, rows, weight, None)
        return out.detach(), torch.autograd.grad(out, rows, along)[0]

    (whole, d_whole), (mixed, d_mixed) = run(x, grad), run(poisoned, bad)
    same = [1, 2, 4, 6, 7]
    assert torch.equal(whole[same], mixed[same])
    assert torch.equal(d_whole[same], d_mixed[same])
    assert mixed[0].isnan().all()
    assert torch.equal(run(x[4:5], grad[4:5])[1], d_whole[4:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_far_from_zero_and_rows_of_one_value(isa: str, dtype: torch.dtype) -> None:
    x = torch.stack([randn(64) + 1000, torch.full((64,), 7.0), torch.zeros(64)]).to(dtype)
    found = ours("layer", x, None, None)
    close(found, of_torch("layer", x.double(), None, None), atol=1e-3)
    assert not found[1:].any()


def strided(*shape: int, seed: int = 0) -> torch.Tensor:
    """Every second number of rows that lie in another order."""
    return randn(*shape[::-1], 2, seed=seed)[..., 0].permute(*reversed(range(len(shape))))


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
    "case", ["strided", "gradient of a sum", "bfloat16 weight", "rows of zeros", "65,537 rows of 3"]
)
def test_what_public_kernels_have_stumbled_over(kind: str, case: str) -> None:
    """quack#88, unsloth#10617, VeOmni#958, sglang#32807, OpenTau#300, apex#411, attorch#18 and candle#2168."""
    shape = (65537, 3) if case.startswith("65") else (3, 5, 40)
    x, grad = randn(*shape), randn(*shape, seed=1)
    weight = 1 + randn(shape[-1], seed=2)
    if case == "strided":
        x, grad, weight = strided(*shape), strided(*shape, seed=1), strided(2, shape[-1], seed=2)[0]
    elif case == "gradient of a sum":
        grad = torch.ones(()).expand(shape)
    elif case == "bfloat16 weight":
        weight = weight.bfloat16()
    elif case == "rows of zeros":
        x[1] = 0
    x.requires_grad_()
    weight.requires_grad_()
    wide = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    found, wanted = ours(kind, x, weight, None), of_torch(kind, *wide, None)
    close(found, wanted)
    gradients = torch.autograd.grad(found, (x, weight), grad)
    assert gradients[1].dtype == weight.dtype
    for gradient, exact in zip(gradients, torch.autograd.grad(wanted, wide, grad.double()), strict=True):
        close(gradient, exact, atol=2e-5 * max(1.0, float(exact.abs().max())))


@pytest.mark.parametrize("width", [40, 1031])
def test_sums_over_rows_do_not_depend_on_threads(width: int) -> None:
    """Rows of several blocks, whose sums are added in order."""
    x, grad, weight = randn(9000 if width == 40 else 300, width), None, randn(width).requires_grad_()
    found = []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            out = norm.rms_norm(x, weight, 1e-6)
            grad = randn(*x.shape, seed=1) if grad is None else grad
            found.append(torch.autograd.grad(out, weight, grad)[0])
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*found)


def test_what_the_kernels_do_not_take_is_computed_by_torch() -> None:
    x, weight = randn(3, 8).double().requires_grad_(), randn(8).double()
    assert torch.autograd.gradcheck(lambda x: norm.rms_norm(x, weight, 1e-5), x)
    assert torch.equal(norm.layer_norm(x, None, weight, 1e-5), F.layer_norm(x, (8,), None, weight, 1e-5))
    assert norm.rms_norm(torch.empty(3, 8, device="meta"), None, 1e-5).shape == (3, 8)
    assert norm.rms_norm(torch.empty(0, 8), None, 1e-5).shape == (0, 8)


def test_a_compiler_sees_torch_s_operators() -> None:
    seen = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compile(lambda x: norm.rms_norm(x, None, 1e-5), backend=backend)(randn(3, 8))
    assert any("rms_norm" in name for name in seen)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((randn(2, 8), randn(7), None, 1e-5, True), "weight"),
        ((randn(2, 8), None, randn(8), 1e-5, True), "has a weight too"),
        ((randn(2, 8).to(torch.int8), None, None, 1e-5, True), "int8"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[object, ...], words: str) -> None:
    assert ops.fast(randn(1))
    with pytest.raises((ValueError, TypeError), match=words):
        torch.ops.torchwright.norm(*arguments)


def test_a_gradient_of_another_shape_is_refused() -> None:
    x = randn(4, 8)
    _, mean, inverse = torch.ops.torchwright.norm(x, None, None, 1e-5, False)
    with pytest.raises(ValueError, match="grad and x differ"):
        torch.ops.torchwright.norm_backward(x[:3], x, mean, inverse, None, [True, False, False])
    with pytest.raises(ValueError, match="mean has 3"):
        torch.ops.torchwright.norm_backward(x, x, inverse[:3], inverse, None, [True, False, False])


class Own(nn.LayerNorm):
    """A subclass may do more in its forward."""


def test_layers_of_torch_are_replaced_and_subclasses_are_left() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm((4, 8)), Own(8), nn.LayerNorm(8, bias=False))
    x = randn(2, 4, 8)
    wanted, names = model(x), list(model.state_dict())
    norm.use_layer_norm(model)
    assert [type(layer) for layer in model] == [norm.LayerNorm, norm.LayerNorm, Own, norm.LayerNorm]
    assert list(model.state_dict()) == names
    found = copy.deepcopy(model)(x)
    assert found.grad_fn is not None
    torch.testing.assert_close(found, wanted)
