"""compile_numpy: results and their types are NumPy's, whichever function serves."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_checks import assert_same, checked, rng

from torchwright.core.errors import TorchwrightError
from torchwright.optimization.numpy import (
    compile_numpy,
    program,
)

DTYPES = ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64", "complex128"]
Pair = namedtuple("Pair", "low high")


def kmeans_step(X_ND, means_KD):
    labels_N = np.argmin(np.linalg.norm(X_ND - means_KD[:, None], axis=2), axis=0)
    members = [labels_N == k for k in range(len(means_KD))]
    return np.stack([(X_ND * mask[:, None]).sum(axis=0) / mask.sum() for mask in members]), labels_N


@pytest.mark.slow
def test_kmeans_step_agrees_and_is_compiled_without_breaks():
    X = np.concatenate([rng().normal(center, 1, (500, 2)) for center in (5, 10)])
    compiled = checked(kmeans_step, X, np.array([[5.0, 5.0], [10.0, 10.0]]))
    assert compiled.report.graph_breaks == 0
    assert compiled.report.graphs >= 1


@pytest.mark.usefixtures("without_kernels")
def test_nested_results_keep_named_tuples_scalars_and_zero_dimensional_arrays_apart():
    def summary(x, *, scale=1.0, names=("low", "high")):
        y = x * scale
        pair = Pair(y.min(), np.asarray(y.max()).reshape(()))
        return {names[0]: pair, names[1]: [y.max(), y.shape], "rows": (y.mean(axis=0), None, "text", 3)}

    checked(summary, rng().normal(size=(3, 4)), scale=2.5, names=("a", "b"))


@pytest.mark.slow
@settings(max_examples=2, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(DTYPES),
    other=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=3).map(tuple),
)
def test_any_dtypes_and_shapes_come_back_as_numpy_gives_them(dtype, other, shape):
    def fn(x, y):
        return x + y, (x * 2).sum(), y

    a = (rng().integers(0, 3, shape)).astype(dtype)
    b = (rng().integers(0, 3, (1,) * len(shape))).astype(other)
    compiled = compile_numpy(fn, measure=False)
    if shape == ():
        a, b = np.asarray(a), np.asarray(b)
    for _ in range(2):
        assert_same(compiled(a, b), fn(a, b))


@pytest.mark.slow
def test_reductions_keep_numpys_result_dtype():
    def reductions(*arrays):
        return [(x.sum(axis=0), x.mean(), x.max(), x.argmax(axis=1)) for x in arrays]

    bits = rng().integers(0, 2, (4, 5))
    checked(reductions, bits.astype("int32"), bits.astype("float32"))


@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 divides integers in float32, and NumPy serves"
)
def test_integer_division_is_float64_as_in_numpy_and_torchs_default_is_restored():
    compiled = checked(lambda x, y: (x / y, (x / y).sum()), np.arange(6), np.arange(1, 7))
    assert compiled.report.float64_default
    assert "float32" in compiled.report.dtype_differences[0]
    assert torch.get_default_dtype() == torch.float32


def test_a_loop_over_an_arrays_elements_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo unrolls it: a thousand elements took 160 s to compile, and were no faster."""

    def fn(a: np.ndarray) -> Any:
        total = 0.0
        for value in a:
            total += value * value
        return total

    monkeypatch.setattr(program, "MOST_OPERATIONS", 20)
    compiled = checked(fn, rng().random(40), status="original")
    assert "operations: a Python loop" in compiled.report.reason


@pytest.mark.parametrize("shape", [(3, 0)])
def test_empty_arrays(shape):
    compiled = compile_numpy(lambda x: (x * 2, x.sum(axis=0)), measure=False)
    x = np.empty(shape)
    for _ in range(2):
        assert_same(compiled(x), (x * 2, x.sum(axis=0)))


@pytest.mark.slow
def test_non_contiguous_arguments():
    x = rng().normal(size=(4, 4))
    checked(lambda reverse, transposed: reverse * 2 + transposed.sum(axis=0), x[::-1, :2], x.T[:, ::2])


@pytest.mark.slow
def test_read_only_and_broadcast_arguments_are_read_without_a_warning_and_never_exposed():
    x = np.broadcast_to(np.arange(3.0), (2, 3))
    checked(lambda x: x * 2, x)
    compiled = compile_numpy(lambda x: (x.T, x + 1), measure=False)
    for _ in range(2):
        assert not compiled(x)[0].flags.writeable
        assert not x.flags.writeable  # Dynamo would have set it
    assert "view of an argument" in compiled.report.reason


@pytest.mark.slow
def test_copies_and_constants_are_not_shared_with_arguments_or_between_calls():
    compiled = compile_numpy(lambda x: (x.astype(np.float64), np.ones(3), x + 1), measure=False)
    x = np.zeros(4)
    for _ in range(3):
        copy, ones, _sum = compiled(x)
        assert (ones == 1).all()
        copy[:] = ones[:] = 7
    assert (x == 0).all()


def nearest_whole(x):
    return np.fix(x) + np.exp(-x * x)


def fraction(x):
    return np.modf(x)[0] * 2 + np.exp(-x)


def side(x):
    return np.cbrt(x) * np.sqrt(x * x + 1)


def direction(x):
    return np.sign(x) * x


def growth(x):
    return np.expm1(x) / (x * x + 1)


@pytest.mark.plain("float64-growth", "float64-direction", "float64-nearest_whole", "float32-growth")
@pytest.mark.parametrize("fn", [nearest_whole, fraction, side, direction, growth])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_operation_that_differs_on_values_which_the_first_call_lacked_stays_with_numpy(
    fn: Any, dtype: Any
):
    first = (np.floor(rng().random(400) * 5) + rng().random(400) * 0.45 + 0.01).astype(dtype)
    later = np.array([-0.6, -1.5, 0.5, 2.5, 1e-10, np.nan, np.inf, -0.0, 1e30, 1e-40]).astype(dtype)
    compiled: Any = compile_numpy(fn, measure=False)
    for x in (first, first, later, -later):
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(compiled(x), fn(x))  # pyright: ignore[reportArgumentType]
    assert compiled.report.status == "original"
    assert "differs in torch" in compiled.report.reason or "another dtype" in compiled.report.reason
    with pytest.raises(TorchwrightError, match="cannot be served"):
        compile_numpy(fn, measure=False, strict=True)(first)


@pytest.mark.slow
def test_edge_values_find_what_no_single_operation_shows():
    # A finite difference that only a negative value brings out, in a function that is traced otherwise than it runs.
    def fn(x):
        return np.where(x < 0, -x if torch.compiler.is_compiling() else x, x) * 2

    compiled = compile_numpy(fn, measure=False)
    x = np.linspace(0.5, 2, 40)
    for values in (x, -x):
        np.testing.assert_array_equal(compiled(values), fn(values))
    assert compiled.report.status == "original"
    assert "disagrees with NumPy with" in compiled.report.reason
    assert "edge values" in str(compiled.report)


@pytest.mark.usefixtures("without_kernels")
def test_a_module_level_generator_is_never_drawn_from_twice():
    generator = np.random.default_rng(3)

    def noisy(x):
        return np.exp(x) + generator.normal(size=x.shape)

    compiled, reference = compile_numpy(noisy, measure=False), np.random.default_rng(3)
    for _ in range(3):
        np.testing.assert_array_equal(compiled(np.ones(4)), np.exp(np.ones(4)) + reference.normal(size=4))
    assert "np.random" in compiled.report.reason


@pytest.mark.slow
def test_a_varying_python_integer_out_of_a_narrow_dtypes_range_is_numpys_error():
    compiled = compile_numpy(lambda n, k: n + k, measure=False)
    small = np.arange(6, dtype=np.int8)
    for k in (1, 2, 3):
        np.testing.assert_array_equal(compiled(small, k), small + np.int8(k))
    with pytest.raises(OverflowError, match="out of bounds"):
        compiled(small, 300)


def test_nan_and_infinity_positions():
    checked(lambda x: (np.sort(x), x.max(), x - x[0], np.isnan(x)), np.array([1.0, np.nan, np.inf, -np.inf]))


@pytest.mark.slow
def test_long_and_cancelling_sums_agree_when_no_less_accurate_than_numpy():
    long = rng().normal(10, 1, size=(300_000, 2)).astype(np.float32)
    compiled = compile_numpy(lambda x, n, y: (x.sum(axis=0) / n.sum(), y.sum()), measure=False)
    compiled(long, np.ones(3, bool), np.linspace(-1, 1, 12))
    assert compiled.report.status == "compiled", str(compiled.report)
