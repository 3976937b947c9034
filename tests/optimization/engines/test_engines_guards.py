"""Guards: which inputs an engine is asked, by its number domain, and what answers the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from engine_calls import Calls, call_of
from torchwright.core.errors import RefusedTechnique, SlowerCall
from torchwright.optimization.engines.compiled.package import Package
from torchwright.optimization.engines.dispatch.call_dispatcher import CallDispatcher
from torchwright.optimization.engines.dispatch.guards import (
    Check,
    Fallback,
    check_seconds,
    compiled_domain,
    guards_of,
    holds_nan,
    holds_not_finite,
    in_words,
)
from torchwright.optimization.engines.dispatch.spec import (
    CallSpec,
    Guard,
    NumberDomain,
    OutsideDomain,
    TensorSpec,
)
from torchwright.optimization.techniques.shared.int8 import Int8Layer
from torchwright.workloads.base import Case

NARROW = NumberDomain(integer_bits=32, values="finite", checks_indices=False)
UNCHECKED = NumberDomain(checks_indices=False)
LARGEST = 2**31 - 1
IDS = torch.tensor([[3, 1, 4], [1, 5, 9]])
X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class Table(nn.Module):
    """Looks rows up in a table of 100, by indices that a function makes of the inputs."""

    def __init__(self, index: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.index, self.table = index, nn.Embedding(100, 4)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.table(self.index(*inputs))


def found(model: nn.Module, *inputs: torch.Tensor, domain: NumberDomain = NARROW) -> list[Guard]:
    return list(guards_of(torch.export.export(model.eval(), inputs), inputs, domain))


def bounds(index: Callable[..., torch.Tensor], *inputs: torch.Tensor, domain: NumberDomain = NARROW) -> Any:
    return [(guard.least, guard.most) for guard in found(Table(index), *inputs, domain=domain)]


@pytest.mark.parametrize(
    ("index", "wanted"),
    [
        (lambda ids: ids, [(0, 99)]),
        (lambda ids: ids + 3, [(-3, 96)]),
        (lambda ids: ids[:, 1:].clone(), [(0, 99)]),
        (lambda ids: torch.where(ids > 5, ids, 0), [(0, 99)]),
        (lambda ids: ids.clamp(0, 99), [(-(2**31), LARGEST)]),
        (lambda ids: ids % 100, [(-(2**31), LARGEST)]),
        (lambda ids: torch.max(ids, torch.tensor(3)), [(-(2**31), 99)]),
        (lambda ids: torch.min(ids, torch.tensor(3)), [(0, LARGEST)]),
        (lambda ids: ids.clone().clamp_max_(99), [(0, LARGEST)]),
        (lambda ids: ids.fmod(100), [(0, LARGEST)]),
        (lambda ids: ids.square() % 100, [(-46340, 46340)]),
        (lambda ids: (ids**3) % 100, [(-1290, 1290)]),
        (lambda ids: (ids @ ids.T) % 100, [(-26754, 26754)]),
        (lambda ids: (~ids) % 100, [(-(2**31), LARGEST)]),
        (lambda ids: ids.tril() % 100, [(-(2**31), LARGEST)]),
        (lambda ids: (ids * 1000) % 100, [(-(2**31) // 1000 + 1, LARGEST // 1000)]),
        (lambda ids: ids.argmax(-1), [(-(2**31), LARGEST)]),
        (lambda ids: ids.ne(1).long().cumsum(1) * 30, [(-(2**31), LARGEST)]),
        (lambda ids: torch.arange(ids.shape[1]), []),
    ],
)
def test_integers_stay_in_32_bits_and_indices_in_their_table(index: Any, wanted: Any) -> None:
    if wanted:
        assert bounds(index, IDS) == wanted
    else:  # nothing is computed of their values
        assert bounds(index, IDS) in ([], [(-(2**31), LARGEST)])


def test_integers_of_an_unknown_range_keep_the_inputs_to_the_examples_own() -> None:
    """A product of all values may need any number of bits."""

    class Product(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return ids.prod(-1)

    assert [(guard.least, guard.most) for guard in found(Product(), IDS)] == [(1, 9)]


@pytest.mark.parametrize(
    ("dtype", "wanted"), [(torch.int8, (-11, 11)), (torch.int16, (-181, 181)), (torch.uint8, (0, 15))]
)
def test_narrow_integers_stay_in_their_type(dtype: torch.dtype, wanted: tuple[int, int]) -> None:
    """PyTorch's products wrap around, OpenVINO's saturate."""

    class Squared(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return ids * ids

    assert [(guard.least, guard.most) for guard in found(Squared(), IDS.to(dtype))] == [wanted]


def test_what_wraps_around_for_the_example_is_refused() -> None:
    class Difference(nn.Module):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return pixels - pixels.flip(1)

    with pytest.raises(RefusedTechnique, match="wraps around"):
        found(Difference(), IDS.to(torch.uint8))


def test_with_64_bits_only_indices_are_bounded() -> None:
    assert bounds(lambda ids: ids % 100, IDS, domain=UNCHECKED) == []
    assert bounds(lambda ids: ids + 1, IDS, domain=UNCHECKED) == [(-1, 98)]
    assert bounds(lambda ids: ids, IDS, domain=NumberDomain()) == []


def test_an_index_without_a_bound_pins_its_inputs_to_the_examples_own_values() -> None:
    assert bounds(lambda ids: ids[:, 2] - ids[:, 0], IDS) == [(1, 9)]
    (guard,) = found(Table(lambda x: (10 * x).long()), X.abs())
    assert (guard.least, guard.most) == (float(X.abs().min()), float(X.abs().max()))


def test_a_hash_that_needs_64_bits_is_refused_to_an_engine_of_32() -> None:
    with pytest.raises(RefusedTechnique, match="integers in 32 bits"):
        bounds(lambda ids: (ids * 2_654_435_761) % 100, IDS)
    assert bounds(lambda ids: (ids * 2_654_435_761) % 100, IDS, domain=UNCHECKED) == []


@pytest.mark.parametrize(
    ("operator", "most"),
    [
        (lambda x, i: x.gather(1, i), 2),
        (lambda x, i: x.index_select(1, i[0]), 2),
        (lambda x, i: x.take_along_dim(i, 1), 2),
    ],
)
def test_every_operator_with_an_index_bounds_it(operator: Any, most: int) -> None:
    index = torch.tensor([[0, 1, 2], [2, 1, 0]])
    guard = found(Calls(operator), X, index)[1]
    assert (guard.tensor, guard.least, guard.most) == (1, 0, most)


def test_an_index_that_is_written_through_is_bounded() -> None:
    def written(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[index] = 0.0
        return x

    guard = found(Calls(written), X, torch.tensor([0, 1]))[1]
    assert (guard.tensor, guard.least, guard.most) == (1, -2, 1)


def test_an_index_by_brackets_may_be_negative() -> None:
    guard = found(Calls(lambda x, i: x[i]), X, torch.tensor([0, 1]))[1]
    assert (guard.least, guard.most) == (-2, 1)


def test_what_the_example_holds_is_let_through() -> None:
    masked, missing = X.clone(), X.clone()
    masked[0, 1], missing[0, 1] = -torch.inf, torch.nan
    values = [found(Calls(F.relu), x) for x in (X, masked, missing)]
    assert [[guard.values for guard in guards] for guards in values] == [["finite"], ["numbers"], []]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (np.nan, ("NaN", "NaN")),
        (np.inf, (None, "infinity")),
        (-np.inf, (None, "infinity")),
        (6e4, (None, None)),
    ],
)
def test_one_value_among_many_is_seen(dtype: Any, value: float, wanted: Any) -> None:
    array = np.ones((7, 33), dtype)
    array[4, 20] = value
    for values, holds in zip(("numbers", "finite"), wanted, strict=True):
        why = Check([Guard(tensor=0, values=values)])([array])
        assert why == (None if holds is None else f"input 0 holds {holds}")


def test_large_and_subnormal_numbers_are_finite_and_warn_of_nothing() -> None:
    array = np.array([3e38, -3e38, 1e-42], np.float32)
    assert Check([Guard(tensor=0, values="finite")])([array, array]) is None
    assert Check([Guard(tensor=0, values="finite", least=-1, most=1)])([array[:0]]) is None


def test_bounds_are_inclusive() -> None:
    check = Check([Guard(tensor=0, least=0, most=9)])
    assert check([np.array([0, 9])]) is None
    for outside in (-1, 10, 2**40):
        assert f"{outside}" in (check([np.array([3, outside])]) or "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_is_seen_where_infinities_meet(dtype: torch.dtype) -> None:
    x = torch.tensor([torch.inf, -torch.inf, 1.0], dtype=dtype)
    assert not holds_nan(x)
    x[2] = torch.nan
    assert holds_nan(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_large_sums_are_no_infinity(dtype: torch.dtype) -> None:
    x = torch.full((9,), torch.finfo(dtype).max, dtype=dtype)
    assert not holds_not_finite(x)
    for value in (torch.inf, -torch.inf, torch.nan):
        x[2] = value
        assert holds_not_finite(x)


def test_the_check_of_a_call_is_timed() -> None:
    large, small = (TensorSpec(dtype="float32", shape=(size,), order=(0,)) for size in (2**20, 2))
    specs = [
        CallSpec(name="call", structure={}, tensors=(tensor,), guards=(Guard(tensor=0, values="finite"),))
        for tensor in (small, large)
    ]
    assert 0 < check_seconds(specs[0]) < check_seconds(specs[1])
    assert check_seconds(replace(specs[1], guards=())) == 0
    halves = replace(large, dtype="bfloat16")
    assert check_seconds(replace(specs[1], tensors=(halves,))) > 0


def test_guards_are_said_in_words() -> None:
    guards = (
        Guard(tensor=0, values="finite"),
        Guard(tensor=1, least=0, most=9),
        Guard(tensor=2, values="finite"),
        Guard(tensor=3, values="numbers", least=-1.5, most=2.0),
    )
    assert in_words([*guards, guards[0]]) == [
        "NaN or infinity in input 0, 2",
        "numbers outside 0 to 9 in input 1",
        "NaN in input 3",
        "numbers outside -1.5 to 2.0 in input 3",
    ]


def test_only_a_frozen_layer_with_an_activation_drops_nan() -> None:
    layer = nn.Linear(3, 3)
    for model, values in ((nn.Sequential(layer, nn.ReLU()), "finite"), (layer, "any"), (nn.ReLU(), "any")):
        program = torch.export.export(model, (X,))
        assert compiled_domain(program, freezing=True).values == values
        assert compiled_domain(program, freezing=False).values == "any"


def test_integers_of_a_fixed_scale_take_finite_values_alone() -> None:
    for activation, values in (((0.1, 100), "finite"), (None, "any")):
        program = torch.export.export(Int8Layer(nn.Linear(3, 3), activation), (X,))
        assert compiled_domain(program, freezing=False).values == values


class Narrow:
    """A call of an engine that only knows small numbers."""

    def __init__(self, fallback: Any) -> None:
        self._inner = call_of(nn.Identity(), (X,))
        self.spec, self.build = self._inner.spec, self._inner.build
        self._check = Check([Guard(tensor=0, values="finite")])
        self._fallback = Fallback(fallback)

    def run(self, tensors: list[torch.Tensor]) -> Any:
        why = self._check([tensor.numpy() for tensor in tensors])
        return self._inner.run(tensors) if why is None else self._fallback.run(tensors, why)


def test_bounds_are_checked_before_the_engine_runs_and_values_behind_it() -> None:
    """An index out of range may end the process; NaN is looked for when the engine has brought it into a cache."""
    check, calls = Check([Guard(tensor=0, least=0, most=9), Guard(tensor=1, values="finite")]), list[int]()
    good, missing = np.ones(3, np.float32), np.full(3, np.nan, np.float32)

    def answer() -> int:
        calls.append(1)
        return 7

    assert check.guarded([np.array([3]), good], answer) == (7, None)
    assert check.guarded([np.array([10]), good], answer)[0] is None
    assert len(calls) == 1, "the engine ran although an index is out of range"
    assert check.guarded([np.array([3]), missing], answer) == (None, "input 1 holds NaN")
    with pytest.raises(ZeroDivisionError):
        check.guarded([np.array([3]), good], lambda: 1 // 0)
    assert check.guarded([np.array([3]), missing], lambda: 1 // 0) == (None, "input 1 holds NaN")


def test_outside_the_domain_the_graph_answers_that_call_alone_and_says_so_once() -> None:
    dispatcher = CallDispatcher([Narrow(lambda: call_of(Calls(lambda x: x.nan_to_num(7)), (X,)))])
    missing = torch.full_like(X, torch.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(dispatcher(X), X)
    with pytest.warns(SlowerCall, match="input 0 holds NaN"):
        assert (dispatcher(missing) == 7).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (dispatcher(missing) == 7).all()
        assert torch.equal(dispatcher(X), X)


def test_without_a_graph_the_original_answers_or_an_error_says_why() -> None:
    missing = torch.full_like(X, torch.nan)
    dispatcher = CallDispatcher([Narrow(None)], original=lambda x: x.nan_to_num(7))
    with pytest.warns(SlowerCall, match="the original: input 0 holds NaN"):
        assert (dispatcher(missing) == 7).all()
    assert torch.equal(dispatcher(X), X)
    assert (dispatcher.run(Case("forward", (missing,), fixed=True)) == 7).all()
    with pytest.raises(OutsideDomain, match="input 0 holds NaN"):
        CallDispatcher([Narrow(None)])(missing)


@pytest.mark.slow
def test_a_package_runs_its_graph_for_what_it_would_drop(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    call = call_of(model, (X,), to=tmp_path / "0.pt2")
    spec = replace(call.spec, guards=(Guard(tensor=0, values="finite"),))
    package = Package(tmp_path / "0.pt2", spec, fallback=lambda: call_of(model, (X,)))
    missing = torch.full_like(X, torch.nan)
    with torch.no_grad(), pytest.warns(SlowerCall):
        assert package.run([missing]).isnan().all()
    with torch.no_grad():
        torch.testing.assert_close(package.run([X]), model(X))
