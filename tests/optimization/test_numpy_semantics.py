"""Where torch leaves NumPy: the table, its cache, the probe's process, and random functions of probed operations."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchwright.optimization.numpy import compile_numpy, domain, probe, semantics
from torchwright.optimization.numpy.compare import RTOL
from torchwright.optimization.numpy.operations import Operation, Step

FIX = Operation("np.fix(a)", ("float64",))
EXP = Operation("np.exp(a)", ("float64",))
UNKNOWN = Operation("np.exp(a) + 12.5", ("float64",))

has_table = pytest.mark.skipif(not semantics.table(), reason="the table is of other versions")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path))
    return tmp_path


@has_table
@pytest.mark.parametrize("name", ["fix", "cbrt", "modf", "sign", "expm1", "arccosh"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_known_departures_are_in_the_table(name: str, dtype: str) -> None:
    assert semantics.table()[f"np.{name}(a): {dtype}"]


@has_table
@pytest.mark.parametrize("name", ["exp", "sqrt", "tanh", "log1p", "floor", "rint", "absolute", "isnan"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_operations_that_agree_everywhere_are_in_the_table(name: str, dtype: str) -> None:
    assert semantics.table()[f"np.{name}(a): {dtype}"] == ""


@has_table
def test_the_table_needs_no_probe() -> None:
    found = semantics.differences([FIX, EXP], probe=lambda _: pytest.fail("it was probed"))
    assert list(map(bool, found.values())) == [True, False]


def test_of_other_versions_the_table_says_nothing() -> None:
    assert semantics.table_of({"torch": "9.9", "numpy": "9.9", "machine": "none"}) == {}


def test_an_unknown_operation_is_probed_once_and_kept(cache: Path) -> None:
    asked: list[Operation] = []

    def answer(operations: list[Operation]) -> list[str]:
        asked.extend(operations)
        return ["differs"] * len(operations)

    for _ in range(2):
        assert semantics.differences([UNKNOWN, UNKNOWN], probe=answer) == {UNKNOWN: "differs"}
    assert asked == [UNKNOWN]


def test_a_damaged_cache_is_probed_again(cache: Path) -> None:
    probe = lambda operations: [""] * len(operations)
    assert semantics.differences([UNKNOWN], probe=probe) == {UNKNOWN: ""}
    (kept,) = (cache / "numpy").iterdir()
    kept.write_text("{")
    assert semantics.differences([UNKNOWN], probe=probe) == {UNKNOWN: ""}
    assert json.loads(kept.read_text()) == {UNKNOWN.key: ""}


def test_a_probe_that_ends_its_process_is_found_by_halves() -> None:
    def run(_: list[str], *, input: str, **__: Any) -> Any:
        ended = "fix" in input
        return subprocess.CompletedProcess(
            [], -8 if ended else 0, '["", ""]' if "exp(a) +" in input else '[""]', ""
        )

    found = semantics.probed([FIX, EXP, UNKNOWN], run=run)
    assert "ended with -8" in found[0]
    assert found[1:] == ["", ""]


def test_the_operation_with_its_python_value_decides_where_the_general_one_differs() -> None:
    verdicts = {"general": "differs", "agrees": "", "special": "differs too"}
    settle = lambda operations: {one: verdicts[one.expression] for one in operations}
    general, agrees, special = (Operation(name, ()) for name in verdicts)
    assert semantics.first_difference([Step("f", general, agrees)], settle) == ""
    assert semantics.first_difference([Step("f", agrees, special)], settle) == ""
    assert "differs too" in semantics.first_difference([Step("f", general, special)], settle)
    assert "differs" in semantics.first_difference([Step("f", agrees), Step("f", general)], settle)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint8", "int64", "float16", "float32", "float64", "complex64"]
)
def test_probe_values_cover_the_domain(dtype: str) -> None:
    values = domain.values(dtype)
    assert values.dtype == dtype
    if values.dtype.kind in "iu":
        limits = np.iinfo(dtype)
        assert {limits.min, limits.max, 0, 1} <= set(values.tolist())
    if values.dtype.kind == "f":
        limits = np.finfo(dtype)
        assert np.isnan(values).any()
        assert {np.inf, -np.inf, 0.5, -0.5, limits.max, limits.smallest_subnormal} <= set(values.tolist())
        assert (np.signbit(values) & (values == 0)).any()
    assert len(domain.rows(dtype)) > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expression", "dtype", "text"),
    [
        ("np.cbrt(a)", "float64", "torch nan"),
        ("np.power(a, b)", "int32", "ValueError"),
        ("np.exp(a)", "float64", ""),
    ],
)
def test_a_probe_tells_a_difference_in_words(expression: str, dtype: str, text: str) -> None:
    (found,) = probe.differences([(expression, [dtype] * expression.count(" b") + [dtype])])
    assert text in found
    assert bool(text) == bool(found)


# ------------------------------------------------------------------------------------------ random functions

UNARY = (
    "exp",
    "tanh",
    "sqrt",
    "log1p",
    "floor",
    "rint",
    "absolute",
    "negative",
    "sin",
    "arctan",
    "square",
    "fix",
)
BINARY = ("+", "-", "*", "/", "np.maximum", "np.fmin", "np.hypot", "np.arctan2", "//", "<", "np.copysign")
LEAVES = ("x", "y", "n", "2", "0.5", "-3", "x", "y")


def expressions() -> st.SearchStrategy[str]:
    def grown(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        unary = st.builds(lambda name, part: f"np.{name}({part})", st.sampled_from(UNARY), parts)
        binary = st.builds(
            lambda name, a, b: f"{name}({a}, {b})" if name.startswith("np.") else f"({a} {name} {b})",
            st.sampled_from(BINARY),
            parts,
            parts,
        )
        chosen = st.builds(lambda a, b, c: f"np.where({a} > 0, {b}, {c})", parts, parts, parts)
        cast = st.builds(
            lambda a, to: f"np.asarray({a}).astype('{to}')", parts, st.sampled_from(("float32", "int64"))
        )
        return unary | binary | chosen | cast

    return st.recursive(st.sampled_from(LEAVES), grown, max_leaves=5)


def same(wanted: Any, found: Any) -> bool:
    """Equal, or within the stated tolerance per operation; values are compared where NumPy's own are not rounding."""
    wanted, found = np.asarray(wanted), np.asarray(found)
    if wanted.dtype != found.dtype or wanted.shape != found.shape:
        return False
    if wanted.dtype.kind != "f":
        return np.array_equal(wanted, found)
    finite = np.isfinite(wanted)
    if not np.array_equal(wanted[~finite], found[~finite], equal_nan=True):
        return False
    largest = np.abs(wanted[finite]).max(initial=1.0)
    return np.allclose(found[finite], wanted[finite], rtol=10 * RTOL[wanted.dtype.name], atol=1e-6 * largest)


@pytest.mark.slow
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    text=expressions().filter(lambda text: "x" in text.replace("exp", "").replace("max", "")),
    dtypes=st.tuples(st.sampled_from(["float32", "float64"]), st.sampled_from(["int32", "int64"])),
    seed=st.integers(0, 1000),
)
def test_random_functions_are_numpys_on_values_that_the_first_call_lacked(
    text: str, dtypes: Any, seed: int
) -> None:
    fn: Any = eval(f"lambda x, y, n: {text}", {"np": np})
    rng = np.random.default_rng(seed)
    dtype, integer = dtypes
    benign = [rng.uniform(0.1, 3, 48).astype(dtype) for _ in range(2)] + [
        rng.integers(1, 9, 48).astype(integer)
    ]
    wild = [rng.choice(domain.values(kind), 48) for kind in (dtype, dtype, integer)]
    mild = [rng.normal(0, 3, 48).astype(dtype) for _ in range(2)] + [rng.integers(-9, 9, 48).astype(integer)]
    compiled: Any = compile_numpy(fn, measure=False, progress=False)
    with np.errstate(all="ignore"):
        for args in (benign, benign, mild, wild):
            try:
                wanted = fn(*args)
            except Exception as error:
                with pytest.raises(type(error)):
                    compiled(*args)
                continue
            assert same(wanted, compiled(*args)), f"{text}: {compiled.report}"
