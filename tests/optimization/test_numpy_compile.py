"""compile_numpy: NumPy's results, types, errors and side effects, whichever function serves."""

from __future__ import annotations

import itertools
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchwright.core.errors import TorchwrightError
from torchwright.hardware.measure.clock import Waiting
from torchwright.optimization.numpy import (
    CompiledNumpy,
    NumpyReport,
    check,
    compile_numpy,
    program,
    progress,
    wrapper,
)

DTYPES = ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64", "complex128"]
Pair = namedtuple("Pair", "low high")
factor = 2.0


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


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run checked graphs operator by operator: for tests of the calls around them, which need no C++ compiler."""
    from functorch.compile import make_boxed_func

    def graph_itself(graph: torch.fx.GraphModule, example_inputs: Any, **options: Any) -> Callable[..., Any]:
        return make_boxed_func(graph.forward)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", graph_itself)


# ----------------------------------------------------------------------------------------- what is returned


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


# ---------------------------------------------------------------------------------- errors and side effects


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
@pytest.mark.skipif(not program.looks_for_zero(), reason="this release of torch would end the process")
def test_division_by_zero_is_numpys_also_where_its_errors_are_trapped():
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


# ------------------------------------------------------------------------------------------------ fallbacks


@pytest.mark.parametrize(
    ("fn", "args", "reason"),
    [
        (lambda s: np.char.upper(s), (np.array(["a", "b"]),), "no torch counterpart"),
        (lambda x: x + x, (np.array([1, "a"], dtype=object),), "no torch counterpart"),
        (lambda x: x + 1, (np.arange(3, dtype=">f8"),), "no torch counterpart"),
        (lambda x: x + 1, (np.ma.masked_array([1.0, 2.0], mask=np.array([False, True])),), "MaskedArray"),
        (lambda g: g.nbytes, (memoryview(b"ab"),), "memoryview"),
        (lambda x: x.shape, (np.ones((2, 3)),), "no array operation"),
    ],
)
@pytest.mark.usefixtures("without_kernels")
def test_what_torch_cannot_take_is_served_by_the_original_with_a_reason(fn, args, reason):
    compiled = compile_numpy(fn, measure=False)
    for _ in range(2):
        np.testing.assert_array_equal(compiled(*args), fn(*args))
    assert compiled.report.status == "original"
    assert reason in compiled.report.reason
    with pytest.raises(TorchwrightError, match="cannot be served"):
        compile_numpy(fn, measure=False, strict=True)(*args)


@pytest.mark.usefixtures("without_kernels")
def test_errstate_block_is_not_traced_but_works():
    def quiet_log(x):
        with np.errstate(all="ignore"):
            return np.log(x)

    compiled = compile_numpy(quiet_log, measure=False)
    for _ in range(2):
        np.testing.assert_array_equal(compiled(np.array([-1.0, 0, 1])), quiet_log(np.array([-1.0, 0, 1])))


@pytest.mark.usefixtures("without_kernels")
def test_graph_breaks_are_counted_and_results_right():
    def with_break(x):
        y = x * 2 + 1
        keys = np.array_str(y[:1])
        return y.sum() + len(keys)

    compiled = compile_numpy(with_break, measure=False)
    x = rng().normal(size=8)
    for _ in range(2):
        np.testing.assert_allclose(compiled(x), with_break(x))
    assert compiled.report.graph_breaks >= 1
    assert compiled.report.break_reasons


@pytest.mark.slow
def test_a_disagreement_is_reported_and_numpy_serves():
    wrong = compile_numpy(lambda x: x * 2.0 if not torch.compiler.is_compiling() else x * 3.0, measure=False)
    np.testing.assert_array_equal(wrong(np.ones(3)), np.full(3, 2.0))
    assert "disagrees" in wrong.report.reason


@pytest.mark.usefixtures("without_kernels")
def test_new_shapes_and_python_values_are_checked_before_they_serve():
    compiled = checked(lambda x, k: x[:k] * k, rng().normal(size=(6, 2)), 3)
    for rows, k in ((7, 3), (7, 5)):
        x = rng().normal(size=(rows, 2))
        np.testing.assert_allclose(compiled(x, k), x[:k] * k)
    assert compiled.report.rechecks >= 1
    assert compiled.report.status == "compiled"


@pytest.mark.usefixtures("without_kernels")
def test_recompile_storm_hands_back_to_numpy():
    compiled = compile_numpy(lambda x, k: np.sum(x, axis=k) * 2, measure=False, dynamic=False)
    x = rng().normal(size=(1,) * 12 + (3,))
    for k in range(12):
        np.testing.assert_allclose(compiled(x, k), x.sum(axis=k) * 2)
    assert "recompile storm" in compiled.report.reason
    assert compiled.report.status == "original"


@pytest.mark.usefixtures("without_kernels")
def test_a_label_is_checked_a_few_times_and_then_served(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wrapper, "MAX_TEXTS", 1, raising=False)
    x = rng().random((20, 20))

    def labelled(x: np.ndarray, tag: str = "", sign: str = "+") -> np.ndarray:
        return np.exp(x) * (2.0 if sign == "+" else -2.0)

    compiled = compile_numpy(labelled, measure=False)
    for number in range(6):
        assert_same(compiled(x, tag=f"run-{number}"), np.exp(x) * 2.0)
    assert len(compiled.reports) == 2
    assert compiled.report.status == "compiled", str(compiled.report)
    for number in range(4):  # a text that is read is checked for each of its values
        assert_same(compiled(x, tag=f"walk-{number}", sign="-"), np.exp(x) * -2.0)
    assert len(compiled.reports) == 4


@pytest.mark.usefixtures("without_kernels")
def test_calls_in_ever_new_ways_are_numpys_in_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wrapper, "MAX_KINDS", 1, raising=False)
    compiled = compile_numpy(lambda arrays: np.exp(sum(arrays)), measure=False)
    for length in range(1, 5):
        assert_same(compiled([np.ones(30)] * length), np.exp(np.full(30, float(length))))
    assert len(compiled.reports) == 1
    assert (compiled.report.status, compiled.report.reason[:32]) == (
        "original",
        "it is called in more than 1 ways",
    )


def test_fast_functions_are_not_compiled():
    compiled = compile_numpy(lambda x: x + 1)
    assert_same(compiled(np.ones(3)), np.full(3, 2.0))
    assert compiled.report.graphs == 0
    assert "a compiled call at least" in compiled.report.reason


def test_a_fast_function_whose_first_call_was_slow_is_not_compiled():
    waits = [0.001]

    def disturbed(x: np.ndarray) -> np.ndarray:
        if waits:
            time.sleep(waits.pop())
        return x + 1

    compiled = compile_numpy(disturbed)
    assert_same(compiled(np.ones(3)), np.full(3, 2.0))
    assert compiled.report.graphs == 0
    assert "a compiled call at least" in compiled.report.reason


# ------------------------------------------------------------------------------------------ global settings


@pytest.mark.parametrize("threads", [1])
def test_settings_are_restored_and_subnormals_survive(threads):
    import torch._dynamo.config as dynamo_config
    import torch._inductor.config as inductor_config

    def settings_now():
        return (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            inductor_config.cpp.threads,
            inductor_config.cpp.enable_unsafe_math_opt_flag,
            dynamo_config.capture_dynamic_output_shape_ops,
            np.geterr(),
            (np.array([5e-320]) * np.array([1.0]))[0],
        )

    before = settings_now()
    compiled = compile_numpy(lambda x: (x.sum(), x * factor), measure=False, threads=threads)
    x = rng().normal(size=50)
    for _ in range(2):
        compiled(x)
        assert settings_now() == before
    with pytest.raises(IndexError):
        compile_numpy(lambda x: (x * 2)[70], measure=False, threads=threads)(x)
    assert settings_now() == before


@pytest.mark.usefixtures("without_kernels")
def test_two_python_threads_get_right_answers_and_the_setting_back():
    before = torch.get_num_threads()
    compiled = compile_numpy(lambda x: np.exp(x).sum(axis=0), measure=False, threads=1)
    inputs = [rng().normal(size=(n, 3)) for n in (20, 21, 22)]
    compiled(inputs[0])
    results: dict[int, np.ndarray] = {}

    def work(n: int) -> None:
        results[n] = compiled(inputs[n])

    workers = [threading.Thread(target=work, args=(n,)) for n in range(len(inputs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for n, x in enumerate(inputs):
        np.testing.assert_allclose(results[n], np.exp(x).sum(axis=0))
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------------------------------- decorator, report


@pytest.mark.usefixtures("without_kernels")
def test_decorator_forms_and_nesting():
    @compile_numpy
    def double(x):
        """Doc."""
        return x * 2

    @compile_numpy(measure=False, threads=1)
    def outer(x):
        return double(x) + 1

    assert double.__name__ == "double"
    assert double.__doc__ == "Doc."
    for _ in range(2):
        np.testing.assert_array_equal(outer(np.ones(3)), np.full(3, 3.0))
    assert outer.report.status == "compiled"
    assert isinstance(outer.report, NumpyReport)
    assert "outer(float64[3])" in str(outer.report)
    assert "compiled" in repr(outer)


@pytest.mark.usefixtures("without_kernels")
def test_methods_partials_and_ufuncs():
    class Model:
        @compile_numpy(measure=False)
        def scaled(self, x):
            return x * 2

    np.testing.assert_array_equal(Model().scaled(np.ones(2)), [2, 2])
    checked(np.hypot, np.array([3.0]), np.array([4.0]))


@pytest.mark.slow
def test_measured_report_has_figures():
    compiled = compile_numpy(lambda x: np.sqrt(x * x + 1) - x, measure_seconds=0.2)
    x = rng().normal(size=200_000)
    np.testing.assert_allclose(compiled(x), np.sqrt(x * x + 1) - x, rtol=1e-9)
    report = compiled.report
    assert report.speedup
    assert report.numpy_ms
    assert report.compiled_ms
    assert report.compile_seconds > 0
    assert report.rounds >= 1
    assert "speed-up" in str(report)
    assert compiled.reports == (report,)


@pytest.mark.parametrize("gain", [1.1, 9.0])
@pytest.mark.usefixtures("without_kernels")
def test_no_speed_up_is_claimed_from_a_single_run(monkeypatch, gain):
    def slow(x):
        if not torch.compiler.is_compiling():
            time.sleep(0.1)
        return np.exp(x) * 2

    monkeypatch.setattr(check, "_time_served", lambda *_: 0.1 / gain)
    monkeypatch.setattr(check, "FEWEST_ROUNDS", 10**6)  # more than compiling leaves time for
    monkeypatch.setattr(check, "MAX_ROUNDS", 10**6)
    compiled = compile_numpy(slow, measure_seconds=0)
    compiled(np.ones(3))
    report = compiled.report
    assert (report.speedup, report.speedup_interval, report.rounds) == (None, None, 1)
    assert report.status == ("compiled" if gain > 2 else "original")
    assert "no speed-up is claimed" in str(report)
    assert "one run each" in str(report)


@pytest.mark.usefixtures("without_kernels")
def test_a_claimed_speed_up_has_at_least_three_rounds_and_an_interval():
    compiled = compile_numpy(lambda x: np.exp(x) * 2 + np.sqrt(x), measure_seconds=0)
    compiled(rng().random(50_000))
    assert compiled.report.rounds >= 3
    assert compiled.report.speedup_interval is not None


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.usefixtures("without_kernels")
def test_a_long_check_prints_one_line(monkeypatch, capsys, shown):
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    compiled = compile_numpy(lambda x: np.exp(x) * 3, measure=False, progress=shown)
    for _ in range(2):
        compiled(np.ones(3))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == shown
    assert all("compiling <lambda>(float64[3])" in line for line in lines)


@pytest.mark.usefixtures("without_kernels")
def test_on_a_busy_machine_the_low_end_is_claimed(monkeypatch):
    waited = itertools.count()  # another second at every look
    monkeypatch.setattr(Waiting, "now", lambda: Waiting({"1": next(waited)}))
    compiled = compile_numpy(lambda x: np.sqrt(x * x + 1) - x, measure_seconds=0.5)
    compiled(rng().normal(size=20_000))
    report = compiled.report
    assert report.busy
    assert report.speedup_interval
    assert report.speedup == report.speedup_interval[0]
    assert "measured on a busy machine" in str(report)


@pytest.mark.parametrize(
    "options",
    [{"threads": 0}, {"rtol": -1.0}, {"measure_seconds": -1}, {"device": "nonsense"}, {"atol": np.nan}],
)
def test_bad_options_are_refused_by_name(options):
    with pytest.raises(TorchwrightError, match=next(iter(options))):
        compile_numpy(np.sum, **options)


def test_only_a_callable_can_be_compiled():
    with pytest.raises(TorchwrightError, match="needs a function"):
        compile_numpy(3)  # pyright: ignore[reportCallIssue, reportArgumentType]
