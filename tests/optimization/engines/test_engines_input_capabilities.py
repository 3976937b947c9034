"""What the original takes beside its example: rows apart only where they are, other types, arrays."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from engine_calls import Calls, dispatcher_of, mlp
from torchwright.core.errors import SlowerCall, WorkloadError
from torchwright.optimization.engines.dispatch.call_dispatcher import CallDispatcher
from torchwright.optimization.engines.dispatch.input_capabilities import probe, with_rows
from torchwright.optimization.engines.dispatch.spec import InputCapabilities
from torchwright.workloads.base import Case

torch.manual_seed(0)
LINEAR = nn.Linear(16, 4).eval()
X = torch.randn(8, 16)
BYTES = torch.randint(0, 256, (8, 16), dtype=torch.uint8)
IDS = torch.randint(2, 50, (4, 7))


def probed(function: Callable[..., Any], *args: Any) -> InputCapabilities:
    return probe(Calls(function).eval(), Case("forward", args=args))


def quietly(dispatcher: CallDispatcher, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowerCall)
        return dispatcher(*args)


# ---------------------------------------------------------------------------------------------------- rows

SEEING: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "softmax over the rows": (lambda x: x.softmax(0), (X,)),
    "the largest of all rows": (lambda x: x / x.abs().max(), (X,)),
    "the largest of all, of bytes": (lambda x: x.float() / x.max(), (BYTES,)),
    "a mean with little weight": (lambda x: x - x.mean(0) * 0.05, (X,)),
    "batch statistics": (lambda x: nn.functional.batch_norm(x, None, None, training=True), (X,)),
    "one row otherwise": (lambda x: x * 2 if x.shape[0] == 1 else x, (X,)),
    "few rows otherwise": (lambda x: x if x.shape[0] > 3 else x * 2, (X,)),
    "many rows otherwise": (lambda x: x if x.shape[0] < 9 else x * 2, (X,)),
    "the number of rows": (lambda x: x * x.shape[0], (X,)),
    "the number of rows as a result": (lambda x: (x, x.shape[0]), (X,)),
    "sorted rows": (lambda x: x.sort(0).values, (X,)),
    "the row before": (lambda x: x + x.roll(1, 0), (X,)),
    "numbered rows": (lambda x: x + torch.arange(len(x))[:, None], (X,)),
    "the largest, of one row": (lambda x: x / x.abs().max(), (X[:1],)),
    "all rows in one": (lambda x: x.sum(0), (X,)),
    "random": (lambda x: x + torch.rand_like(x), (X,)),
}


@pytest.mark.parametrize("name", SEEING)
def test_rows_that_see_each_other_are_not_taken_apart(name: str):
    function, args = SEEING[name]
    assert not probed(function, *args).pieces


APART: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]] = {
    "a linear layer": (LINEAR, (X,), (0,)),
    "attention over tokens": (lambda x: x @ x.transpose(1, 2), (X.view(4, 4, 8),), (0,)),
    "tokens": (nn.Embedding(50, 4), (IDS,), (0,)),
    "tokens and a mask": (
        lambda ids, mask: (nn.functional.one_hot(ids, 50).sum(2) * mask).float(),
        (IDS, torch.ones_like(IDS)),
        (0, 1),
    ),
    "a scale as long as there are rows": (lambda x, s: x * s, (X[:, :8], torch.randn(8)), (0,)),
    "a number first": (lambda t, x: x * t, (torch.tensor(2.0), X), (1,)),
    "one row": (LINEAR, (X[:1],), (0,)),
    "a constant beside": (lambda x: (x * 2, "text", None), (X,), (0,)),
}


@pytest.mark.parametrize("name", APART)
def test_rows_apart_are_found(name: str):
    function, args, batched = APART[name]
    takes = probed(function, *args)
    assert (takes.batched, takes.pieces) == (batched, True)


def test_the_example_is_not_changed_by_a_model_that_changes_its_input():
    x = X.clone()
    assert probed(lambda x: x.add_(1), x).pieces
    torch.testing.assert_close(x, X)


def test_a_slow_original_is_asked_no_longer_than_it_may_be():
    calls: list[int] = []

    def slow(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x

    takes = probe(Calls(slow), Case("forward", args=(X,)), seconds=-1.0)
    assert calls == []
    assert not takes.pieces
    assert takes.parameters[0].name == "args"


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 20])
def test_a_case_with_other_rows(rows: int):
    case = with_rows(Case("forward", args=(X, X[0])), (0,), rows)
    assert case.args[0].shape == (rows, 16)
    assert case.args[1] is X[0] or case.args[1].shape == (16,)


# --------------------------------------------------------------------------------------------- other types


def types(takes: InputCapabilities) -> dict[Any, Any]:
    return {tuple(s.types.items()): s.outputs for s in takes.substitutes}


def test_types_that_the_original_takes_are_found_with_what_it_answers():
    assert types(probed(LINEAR, X)) == {}
    cast = types(probed(lambda x: LINEAR(x.float()), X))
    assert cast[((0, "float64"),)] == cast[((0, "uint8"),)] == ("float32",)
    following = types(probed(lambda x: x * 2, X))
    assert following[((0, "float64"),)] == ("float64",)
    assert ((0, "uint8"),) not in following  # which overflows
    assert types(probed(lambda ids: torch.tensor([1.0, 2.0] * 30)[ids.long()], IDS))[((0, "int32"),)]


def test_types_of_several_tensors_at_once():
    found = types(
        probed(
            lambda a, b, m: nn.functional.embedding(a + b, torch.ones(99, 2)) * m[..., None], IDS, IDS, IDS
        )
    )
    assert ((0, "int32"), (1, "int32")) in found
    assert ((0, "int32"), (1, "int32"), (2, "int32")) in found


def test_a_result_that_is_a_number_does_not_shift_the_types():
    takes = probed(lambda x: (3, x.float(), 2.5, x * 2), X)
    assert types(takes)[((0, "float64"),)] == ("float32", "float64")


def test_other_types_are_answered_as_the_original_does():
    model = Calls(lambda x: (LINEAR(x.float()), 7, x * 2))
    takes = probe(model, Case("forward", args=(X,)))
    dispatcher = dispatcher_of(model, X, takes={"substitutes": takes.substitutes})
    with pytest.warns(SlowerCall, match="tensors brought to float32 first"):
        found = dispatcher(X.double())
    wanted = model(X.double())
    assert [type(v) for v in found] == [type(v) for v in wanted]
    for a, b in ((found[0], wanted[0]), (found[2], wanted[2])):
        torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-5)
    strided = X.double().t().contiguous().t()
    torch.testing.assert_close(dispatcher(strided)[2], strided * 2, rtol=1e-6, atol=1e-6)


def test_a_changed_input_of_another_type_is_left_to_the_original():
    model = Calls(lambda x: x.add_(1))
    takes = probe(model, Case("forward", args=(X.clone(),)))
    assert takes.substitutes
    with pytest.raises(WorkloadError):
        dispatcher_of(model, X.clone(), takes={"substitutes": takes.substitutes})(X.double())


# -------------------------------------------------------------------------------------------------- arrays


def test_arrays_are_taken_where_the_original_takes_them():
    assert not probed(LINEAR, X).arrays
    assert not probed(lambda x: x * 2, X).arrays  # it answers arrays with arrays
    model = Calls(lambda x: LINEAR(torch.as_tensor(x).float()))
    takes = probe(model, Case("forward", args=(X,)))
    assert takes.arrays
    dispatcher = dispatcher_of(model, X, takes={"arrays": True, "substitutes": takes.substitutes})
    array = X.numpy().copy()
    frozen = array.copy()
    frozen.flags.writeable = False
    for given in (array, np.asfortranarray(array), array[::-1], frozen, np.repeat(array, 2, 1)[:, ::2]):
        torch.testing.assert_close(dispatcher(given), LINEAR(torch.tensor(given.copy())).detach())
    with pytest.warns(SlowerCall, match="brought to float32"):
        torch.testing.assert_close(dispatcher(array.astype(np.float64)), LINEAR(X).detach())
    with pytest.raises(WorkloadError):
        dispatcher_of(mlp(), X)(array)


# ------------------------------------------------------------------------------------------- said, refused


def test_each_way_is_said_once_and_not_for_each_call():
    model = mlp()
    dispatcher = dispatcher_of(model, X, takes={"batched": (0,), "pieces": True}, original=model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in (1, 2, 3, 9, 20, 1, 2):
            dispatcher(torch.randn(rows, 16))
        for rows in (2, 3, 4):
            dispatcher(torch.randn(2, rows, 16))
    assert [str(w.message).split("slower way: ")[1][:12] for w in said] == ["1 rows by co", "the original"]
    assert all(w.category is SlowerCall for w in said)
    assert all(w.filename == __file__ for w in said)


def test_strict_refuses_every_slower_way():
    dispatcher = dispatcher_of(mlp(), X, takes={"batched": (0,), "pieces": True}, original=mlp(), strict=True)
    dispatcher(X)
    for other in (X[:1], X.double(), X.to_sparse(), X.numpy(), X[None]):
        with pytest.raises(WorkloadError, match=r"compiled for other calls.*float32\[8, 16\]"):
            dispatcher(other)


def test_pieces_never_for_a_model_that_changes_its_input():
    model = Calls(lambda x: x.add_(1))
    dispatcher = dispatcher_of(model, X.clone(), takes={"batched": (0,), "pieces": True})
    with pytest.raises(WorkloadError):
        quietly(dispatcher, torch.randn(11, 16))
