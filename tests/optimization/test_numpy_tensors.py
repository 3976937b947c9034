"""compile_numpy called with tensors, and in float32; the reference is NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import torchwright as tw
from torchwright.core.errors import TorchwrightError
from torchwright.optimization.numpy.narrow import RTOL


def scaled(x: Any, y: Any) -> dict[str, Any]:
    centred = x - x.mean(axis=-1, keepdims=True)
    return {"sum": np.tanh(centred) * 2.0 + y, "count": (x > 0).sum(), "size": x.shape[0]}


def mixed(i: Any, b: Any) -> Any:
    return np.where(b, i * 2, i - 1), i[b.nonzero()[0]].sum()


@pytest.fixture(scope="module")
def compiled() -> Any:
    return tw.compile_numpy(scaled, measure=False)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(6, 8, dtype=torch.float64)
    return {
        "plain": x,
        "transposed": torch.randn(8, 6, dtype=torch.float64).T,
        "every other": torch.randn(6, 16, dtype=torch.float64)[:, ::2],
        "expanded": torch.randn(1, 8, dtype=torch.float64).expand(6, 8),
        "no rows": torch.empty(0, 8, dtype=torch.float64),
        "float32": x.float(),
    }


LAYOUTS = ("every other", "expanded")
"""At night alone: in the plain run `transposed` has strides of its own."""


@pytest.mark.plain("no rows")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LAYOUTS else name for name in tensors()]
)
def test_tensors_in_and_out(compiled: Any, name: str) -> None:
    x = tensors()[name]
    before = x.clone()
    expected = scaled(x.numpy(), x.numpy()[..., :1])
    for _ in range(2):  # the check, and what serves
        found = compiled(x, x[..., :1])
        assert isinstance(found["sum"], torch.Tensor)
        assert found["sum"].dtype == x.dtype
        assert found["sum"].device == x.device
        torch.testing.assert_close(found["sum"], torch.from_numpy(expected["sum"]), rtol=1e-5, atol=1e-7)
        assert isinstance(found["count"], torch.Tensor)
        assert found["count"].dtype == torch.int64
        assert found["count"].item() == expected["count"]
        assert found["size"] == len(x)
        assert type(found["size"]) is int
    assert torch.equal(x, before)


@pytest.mark.slow
def test_integers_booleans_and_arrays_beside_tensors() -> None:
    function = tw.compile_numpy(mixed, measure=False)
    i, b = torch.arange(-4, 4), torch.tensor([True, False] * 4)
    expected = mixed(i.numpy(), b.numpy())
    for arguments in ((i, b), (i, b.numpy()), (i.int(), b)):
        found = function(*arguments)
        assert all(isinstance(value, torch.Tensor) for value in found)
        assert found[0].dtype == arguments[0].dtype
        assert found[0].tolist() == expected[0].tolist()
        assert found[1].item() == expected[1]
    assert isinstance(function(i.numpy(), b.numpy())[0], np.ndarray)


def test_memory_is_the_tensors_own() -> None:
    seen: list[Any] = []

    def look(x: Any) -> Any:
        seen.append(x.__array_interface__["data"][0])
        return x[::-1]

    x = torch.arange(8.0)[::2]
    found = tw.compile_numpy(look)(x)
    assert seen[0] == x.data_ptr()
    assert found.tolist() == [6.0, 4.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(2, requires_grad=True), "requires grad"),
        (torch.ones(2, dtype=torch.bfloat16), "NumPy has no bfloat16"),
        (torch.ones(2, device="meta"), "it is on meta"),
        (torch.eye(2).to_sparse(), "its layout is torch.sparse"),
    ],
)
def test_tensors_that_numpy_cannot_read_are_refused_in_words(tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(TorchwrightError) as refusal:
        tw.compile_numpy(scaled)([tensor], 1.0)
    assert reason in (refusal.value.found or "")


def test_tensors_on_two_devices_are_refused() -> None:
    with pytest.raises(TorchwrightError, match="several devices") as refusal:
        tw.compile_numpy(scaled)(torch.ones(2), torch.ones(2, device="meta"))
    assert refusal.value.found == "cpu and meta"


def smooth(x: Any, w: Any) -> Any:
    return np.exp(-np.abs(x @ w)).sum(axis=1) / x.shape[1]


@pytest.mark.slow
def test_float32_on_request_against_float64() -> None:
    function = tw.compile_numpy(smooth, float32=True, measure=False)
    generator = np.random.default_rng(0)
    for _ in range(3):
        x, w = generator.standard_normal((32, 64)), generator.standard_normal((64, 16))
        found = function(x, w)
        assert found.dtype == np.float32
        exact = smooth(x.astype(np.float32).astype(np.float64), w.astype(np.float32).astype(np.float64))
        np.testing.assert_allclose(found, exact, rtol=RTOL, atol=2e-6 * np.abs(exact).max())
    assert function.report.status == "compiled"
    tensors = function(torch.from_numpy(x), torch.from_numpy(w))
    assert tensors.dtype == torch.float32
    assert tw.compile_numpy(smooth, measure=False)(x, w).dtype == np.float64


@pytest.mark.slow
def test_float32_that_is_too_far_off_is_numpys_in_float64() -> None:
    def cancels(x: Any) -> Any:
        return (x + 1e7) - 1e7

    function, x = tw.compile_numpy(cancels, float32=True, measure=False), np.linspace(0, 1, 64)
    found = function(x)
    assert function.report.status == "original"
    assert found.dtype == np.float32
    np.testing.assert_allclose(function(x), x, rtol=1e-6, atol=1e-7)


def test_float32_loses_no_write() -> None:
    def writes(x: Any) -> Any:
        x[0] = 1
        return x * 2

    with pytest.raises(ValueError, match="read-only"):
        tw.compile_numpy(writes, float32=True)(np.zeros(4))
