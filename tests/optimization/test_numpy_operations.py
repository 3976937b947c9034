"""The operations of a traced NumPy function, as the table of semantics names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from torchwright.optimization.numpy.operations import Step, steps


def traced(fn: Callable[..., Any], *calls: tuple[Any, ...]) -> list[Step]:
    """The steps of the graph that Dynamo traces for the last of several calls."""
    found: list[list[Step]] = []

    def backend(graph: Any, _: Any) -> Any:
        found.append(list(steps(graph.graph)))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend)
    for call in calls:
        compiled(*call)
    return found[-1]


def keys(fn: Callable[..., Any], *args: Any) -> list[str]:
    return [step.general.key for step in traced(fn, args) if step.general]


X = np.linspace(0.5, 2, 6)
N = np.arange(1, 7)


def test_functions_that_torch_implements_by_one_another_keep_numpys_names() -> None:
    found = keys(lambda x: (np.fix(x), np.round(x), np.rint(x), np.around(x), np.abs(x)), X)
    assert found == [f"np.{n}(a): float64" for n in ("fix", "round", "rint", "round", "absolute")]


@pytest.mark.parametrize(
    ("fn", "args", "key"),
    [
        (lambda x: x % 3, (X,), "np.remainder(a, b): float64, float64"),
        (lambda x, n: x + n, (X.astype("float32"), N.astype("int32")), "np.add(a, b): float64, float64"),
        (lambda x, y: x < y, (X.astype("float32"), X), "np.less(a, b): float32, float64"),
        (lambda n: n**2, (N,), "a ** 2: int64"),
        (lambda n: np.power(2, n), (N,), "np.power(2, a): int64"),
        (lambda x: x**x, (X,), "a ** b: float64, float64"),
        (lambda x: -x, (X,), "np.negative(a): float64"),
        (lambda x: x.astype(np.int8), (X,), "a.astype('int8'): float64"),
        (lambda x: x.sum(axis=0, keepdims=True), (X,), "np.sum(a, axis=-1): float64"),
        (lambda x: np.std(x, ddof=1), (X,), "np.std(a, ddof=1): float64"),
        (lambda x: np.clip(x, 0.25, None), (X,), "np.clip(a, 1, None): float64"),
        (lambda n: np.clip(n, 0, 1000), (N.astype("int8"),), "np.clip(a, 1, 1000): int8"),
        (lambda x: np.max(x), (X,), "np.max(a): float64"),
    ],
)
def test_an_operation_is_named_by_its_values_and_the_dtypes_of_numpys_loop(fn, args, key) -> None:
    assert keys(fn, *args) == [key]


def test_a_python_value_is_kept_for_the_operations_that_differ_in_general() -> None:
    (step,) = traced(lambda x: x % 3, (X,))
    assert step.special is not None
    assert step.special.key == "np.remainder(a, 3): float64"


def test_a_value_written_into_an_array_of_another_dtype_is_a_cast() -> None:
    def fn(n: Any, x: Any) -> Any:
        copy = n.copy()
        copy[:] = x * 2
        return copy

    assert "a.astype('int64'): float64" in keys(fn, N, X)


def test_operations_that_only_move_values_need_no_probe() -> None:
    assert keys(lambda x: np.concatenate([x.reshape(2, 3).T.ravel(), x[::2]]), X) == []


def test_another_dtype_than_numpys_is_found_inside_the_function() -> None:
    found = traced(lambda n: ((n / 3) > 1, n), (N,))
    assert [step.dtype_difference for step in found if step.dtype_difference] == [
        "divide: NumPy float64, compiled float32"
    ]


def test_a_varying_python_integer_beside_a_narrow_array_is_refused() -> None:
    small = np.arange(6, dtype=np.int8)
    assert not any(step.refusal for step in traced(lambda n, k: n + k, (small, 3)))
    (step,) = traced(lambda n, k: n + k, (small, 3), (small, 5))
    assert "range" in step.refusal
