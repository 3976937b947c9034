"""compile_numpy: errors, writes and random numbers happen as in NumPy, and once."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_checks import checked, rng

from torchwright.optimization.numpy import (
    compile_numpy,
    program,
)


@pytest.mark.usefixtures("without_kernels")
def test_errors_raised_by_the_function_are_numpys_on_the_first_and_on_served_calls():
    def pick(x, index):
        return x[index] * 2

    compiled = checked(pick, np.arange(4.0), np.array([1, 2]))
    with pytest.raises(IndexError, match="index 9 is out of bounds"):
        compiled(np.arange(4.0), np.array([1, 9]))
    assert compiled.report.status == "compiled"
    fresh = compile_numpy(pick, measure=False)
    with pytest.raises(IndexError):
        fresh(np.arange(4.0), np.array([1, 9]))
    assert fresh.report.status == "unmeasured"
    with pytest.raises(TypeError):
        fresh(np.arange(4.0))


@pytest.mark.parametrize("divide", [lambda n, m: n // m, lambda n, m: n % m, np.fmod, np.divmod])
def test_a_division_that_may_end_the_process_is_refused(divide, monkeypatch):
    monkeypatch.setattr(program, "looks_for_zero", lambda: False)
    compiled = compile_numpy(lambda n, m: divide(n * 3, m), measure=False)
    with np.errstate(divide="ignore"):
        compiled(np.arange(40), np.zeros(40, int))
    assert compiled.report.status == "original"
    assert "divides by zero" in compiled.report.reason
    floats = compile_numpy(lambda n, m: divide(n * 3, m), measure=False)
    floats(np.arange(40.0), np.ones(40))
    assert "divides by zero" not in floats.report.reason


@pytest.mark.slow
def test_division_by_zero_is_numpys_also_where_its_errors_are_trapped():
    if not program.looks_for_zero():
        pytest.skip("this release of torch would end the process")
    compiled = checked(lambda n, m, x: (n // m, 1 / x), np.arange(40), np.ones(40, int), np.ones(3))
    with np.errstate(divide="ignore"):
        assert (compiled(np.arange(40), np.zeros(40, int), np.ones(3))[0] == 0).all()
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        compiled(np.arange(40), np.ones(40, int), np.zeros(3))


@pytest.mark.parametrize("form", ["item", "inplace", "out", "view"])
@pytest.mark.usefixtures("without_kernels")
def test_in_place_writes_happen_once_and_stay_with_numpy(form):
    def fn(x, out):
        if form == "item":
            x[0] = 5
        elif form == "inplace":
            x += 1
        elif form == "out":
            np.add(x, 1, out=out)
        else:
            x.T[0] *= 3
        return x * 2

    compiled = compile_numpy(fn, measure=False)
    x, out = np.ones((2, 2)), np.zeros((2, 2))
    y, out_y = x.copy(), out.copy()
    for _ in range(2):
        np.testing.assert_array_equal(compiled(x, out), fn(y, out_y))
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(out, out_y)
    assert compiled.report.status == "original"
    assert "writes into an argument" in compiled.report.reason


@pytest.mark.usefixtures("without_kernels")
def test_a_write_that_the_first_call_did_not_make_is_still_numpys():
    def by_count(x, count):
        if count > 5:
            x += 1
        return x * 2

    compiled = checked(by_count, np.ones(4), 1)
    x = np.ones(4)
    assert (compiled(x, 9) == 4).all()
    assert (x == 2).all()
    assert compiled.report.status == "original"


@pytest.mark.slow
def test_arguments_are_never_changed():
    x = rng().normal(size=(5, 5))
    before = x.copy()
    compiled = checked(lambda x: x * 2 - x.max(), x)
    np.testing.assert_array_equal(x, before)
    assert compiled.report.edge_differences == ()


@pytest.mark.usefixtures("without_kernels")
def test_numpys_global_random_stream_is_followed():
    compiled = compile_numpy(lambda x: x + np.random.rand(3), measure=False)
    state = np.random.get_state()
    try:
        np.random.seed(3)
        expected = [np.random.rand(3) for _ in range(3)]
        np.random.seed(3)
        for row in expected:
            np.testing.assert_array_equal(compiled(np.zeros(3)), row)
    finally:
        np.random.set_state(state)
    assert "np.random" in compiled.report.reason


@pytest.mark.usefixtures("without_kernels")
def test_assignment_to_outer_names_stays_with_numpy():
    calls = 0

    def counting(x):
        nonlocal calls
        calls += 1
        return x + 1

    compiled = compile_numpy(counting, measure=False)
    for expected in (1, 2, 3):
        compiled(np.ones(2))
        assert calls == expected
    assert "'calls'" in compiled.report.reason
