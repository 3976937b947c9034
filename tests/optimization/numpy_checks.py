"""Calls of compiled NumPy functions, held against the functions themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from torchwright.optimization.numpy import CompiledNumpy, compile_numpy


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def checked(fn: Callable[..., Any], *args, status="compiled", **kwargs) -> CompiledNumpy:
    """Compile without timing, call twice (the check, then a served call), and compare both with ``fn``."""
    compiled = compile_numpy(fn, measure=False)
    expected = fn(*args, **kwargs)
    for _ in range(2):
        assert_same(compiled(*args, **kwargs), expected)
    assert compiled.report.status == status, str(compiled.report)
    return compiled


def assert_same(result, expected) -> None:
    assert type(result) is type(expected)
    if isinstance(expected, tuple | list):
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert list(result) == list(expected)
        for name in expected:
            assert_same(result[name], expected[name])
    elif isinstance(expected, np.ndarray | np.generic):
        assert result.dtype == expected.dtype
        assert result.shape == expected.shape
        rtol = 4e-3 if expected.dtype == "float16" else 1e-5
        wanted: Any = expected
        np.testing.assert_allclose(result, wanted, rtol=rtol, atol=1e-8)
    else:
        assert result == expected
