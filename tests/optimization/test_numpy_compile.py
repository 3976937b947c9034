"""compile_numpy: what is not compiled and why, global settings, the decorator and its report."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
import torch
from numpy_checks import assert_same, checked, rng

from torchwright.core.errors import TorchwrightError
from torchwright.hardware.measure.clock import Waiting
from torchwright.optimization.numpy import (
    NumpyReport,
    check,
    compile_numpy,
)

factor = 2.0


# ------------------------------------------------------------------------------------------- fallbacks


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
def test_a_label_is_checked_a_few_times_and_then_served():
    x = rng().random((20, 20))

    def labelled(x: np.ndarray, tag: str = "", sign: str = "+") -> np.ndarray:
        return np.exp(x) * (2.0 if sign == "+" else -2.0)

    compiled = compile_numpy(labelled, measure=False)
    compiled.max_texts = 1
    for number in range(6):
        assert_same(compiled(x, tag=f"run-{number}"), np.exp(x) * 2.0)
    assert len(compiled.reports) == 2
    assert compiled.report.status == "compiled", str(compiled.report)
    for number in range(4):  # a text that is read is checked for each of its values
        assert_same(compiled(x, tag=f"walk-{number}", sign="-"), np.exp(x) * -2.0)
    assert len(compiled.reports) == 4


@pytest.mark.usefixtures("without_kernels")
def test_calls_in_ever_new_ways_are_numpys_in_the_end():
    compiled = compile_numpy(lambda arrays: np.exp(sum(arrays)), measure=False)
    compiled.max_kinds = 1
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


# ------------------------------------------------------------------------------------- global settings


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


# ----------------------------------------------------------------------------------- decorator, report


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
    compiled = compile_numpy(slow, measure_seconds=0)
    judge = compiled._check
    judge.fewest_rounds = judge.most_rounds = 10**6  # more than compiling leaves time for
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
def test_a_long_check_prints_one_line(capsys, shown):
    compiled = compile_numpy(lambda x: np.exp(x) * 3, measure=False, progress=shown)
    compiled.quiet_seconds = 0.0
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
