"""The call dispatcher: whatever a tensor's layout, memory or container is, the original's answer."""

from __future__ import annotations

import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from engine_calls import FORMS, Calls, Picture, call_of, dispatcher_of, mlp
from torchwright.core.errors import SlowerCall, TorchwrightError, WorkloadError
from torchwright.optimization.engines.compiled.program import FreeSizes
from torchwright.optimization.engines.dispatch.call import parameters_of
from torchwright.optimization.engines.dispatch.call_dispatcher import CallDispatcher
from torchwright.optimization.engines.dispatch.spec import InputCapabilities

Pair = namedtuple("Pair", "first second")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Changing(nn.Module):
    """Adds one to its input in place, and returns it."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.view(-1).add_(1)
        return x + y, x


class Added(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        return x + y, x


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packages")


@pytest.fixture(scope="module", params=FORMS)
def picture(request: pytest.FixtureRequest, packages: Path) -> CallDispatcher:
    to = packages / "picture.pt2" if request.param == "package" else None
    return dispatcher_of(Picture(), torch.randn(2, 3, 8, 6), torch.randn(5), to=to)


@pytest.fixture(scope="module")
def dense() -> CallDispatcher:
    """For what the dispatcher does before a call: a graph, which needs no compiler."""
    return dispatcher_of(mlp(), torch.randn(4, 16))


@pytest.fixture(scope="module", params=FORMS)
def changing(request: pytest.FixtureRequest, packages: Path) -> CallDispatcher:
    to = packages / "changing.pt2" if request.param == "package" else None
    return dispatcher_of(Added(), torch.randn(4, 6), torch.randn(4, 6), to=to)


def same(found: Any, wanted: Any) -> None:
    leaves, spec = pytree.tree_flatten(found)
    expected, wanted_spec = pytree.tree_flatten(wanted)
    assert spec == wanted_spec
    for a, b in zip(leaves, expected, strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b.detach(), **CLOSE)
        else:
            assert a == b


# ------------------------------------------------------------------------------------------------- layouts

LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "dense": lambda: torch.randn(2, 3, 8, 6),
    "channels last": lambda: torch.randn(2, 3, 8, 6).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(2, 3, 6, 8).transpose(2, 3),
    "reversed dimensions": lambda: torch.randn(6, 8, 3, 2).permute(3, 2, 1, 0),
    "every other": lambda: torch.randn(4, 3, 16, 6)[::2, :, ::2],
    "expanded": lambda: torch.randn(1, 3, 1, 6).expand(2, 3, 8, 6),
    "one number": lambda: torch.randn(()).expand(2, 3, 8, 6),
    "from the middle": lambda: torch.randn(7, 3, 8, 6)[3:5],
    "at an odd element": lambda: torch.randn(2 * 3 * 8 * 6 + 1)[1:].view(2, 3, 8, 6),
    "overlapping windows": lambda: torch.randn(2, 3, 13).unfold(2, 6, 1),
    "negated": lambda: torch.randn(2, 3, 8, 6, dtype=torch.complex64).conj().imag,
    "a parameter": lambda: nn.Parameter(torch.randn(2, 3, 8, 6)),
    "of a larger storage": lambda: torch.randn(2, 5, 9, 7)[:, 1:4, 1:, 1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_input_of_any_layout_is_read_as_what_it_is(picture: CallDispatcher, layout: str):
    x, scale = LAYOUTS[layout](), torch.randn(10)[::2]
    for _ in range(2):  # found, and remembered
        same(picture(x, scale), Picture()(x, scale))


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu"), torch.enable_grad]
)
def test_calls_of_one_kind_are_looked_up_once_in_each_mode(dense: CallDispatcher, mode: Any, monkeypatch):
    looked, real = [], CallDispatcher._looked_up
    monkeypatch.setattr(
        CallDispatcher, "_looked_up", lambda self, *call: looked.append(1) or real(self, *call)
    )
    x, wanted = torch.randn(4, 16), mlp()
    dense(x)
    with mode():
        for given in (x, x, x.clone(), x.clone().requires_grad_(), torch.nn.Parameter(x.clone())):
            with torch.autocast("cpu", enabled=False):
                answer = wanted(x).detach()
            torch.testing.assert_close(dense(given).detach(), answer, **CLOSE)
        looked.clear()
        for _ in range(3):
            dense(x)
        assert len(looked) <= 1
    torch.testing.assert_close(dense(x), wanted(x).detach(), **CLOSE)


def test_what_looked_alike_but_for_its_layout_is_told_apart(picture: CallDispatcher):
    """One remembered way must not serve for another layout of the same sizes."""
    x, scale = torch.randn(2, 3, 8, 6), torch.randn(5)
    for view in (x, x.to(memory_format=torch.channels_last), torch._neg_view(x), x, torch._neg_view(x)):
        same(picture(view, scale), Picture()(view, scale))


def test_outputs_lie_in_memory_as_the_originals(picture: CallDispatcher):
    x, scale = torch.randn(2, 3, 8, 6), torch.randn(5)
    found, wanted = picture(x, scale), Picture()(x, scale)
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        if isinstance(a, torch.Tensor):
            assert a.stride() == b.stride()
    assert found["flat"].view(-1).shape == wanted["flat"].view(-1).shape
    assert found["last"].is_contiguous(memory_format=torch.channels_last)


def test_a_layout_that_compiled_code_gives_otherwise_is_mended():
    from torchwright.optimization.engines.dispatch.results import laid_out, result_builder, with_constants

    spec = pytree.tree_flatten((1, None, 2, 3))[1]
    build = with_constants(
        laid_out(result_builder(spec), [(1, 0), None, None]), ("tensor", "None", "3", "tensor")
    )
    t = torch.randn(3, 4)
    found = build([t, None, torch.tensor(3), t])
    torch.testing.assert_close(found[0], t)
    assert found[0].stride() == (1, 3)
    assert found[1:3] == (None, 3)
    assert found[3] is t


def test_complex_and_conjugate_inputs():
    model = Calls(lambda z: torch.view_as_real(z * 2))
    z = torch.randn(3, 4, dtype=torch.complex64)
    dispatcher = dispatcher_of(model, z)
    for view in (z, z.conj(), z, z.conj().t().contiguous().t(), z.t().conj().t()):
        same(dispatcher(view), model(view.resolve_conj()))


@pytest.mark.parametrize("ids", [torch.arange(24).view(4, 6)[:, ::2], torch.arange(12).view(3, 4).t()])
def test_strided_integers(ids: torch.Tensor):
    model = nn.Embedding(30, 5)
    dispatcher = dispatcher_of(model, torch.zeros(4, 3, dtype=torch.int64))
    same(dispatcher(ids), model(ids))


def test_inputs_without_elements():
    model = Calls(lambda x: (x * 2, x.sum(0)))
    dispatcher = dispatcher_of(model, torch.randn(0, 4))
    same(dispatcher(torch.randn(0, 4)), model(torch.randn(0, 4)))
    same(dispatcher(torch.randn(4, 0).t()), model(torch.randn(4, 0).t()))


def test_what_has_no_dense_data_is_refused_in_words(dense: CallDispatcher):
    x = torch.eye(4, 16)
    dense(x)
    for other in (x.to_sparse(), x.to("meta"), x.to_mkldnn()):
        with pytest.raises(WorkloadError, match="sparse, or has no data"):
            dense(other)


# ------------------------------------------------------------------------- memory that tensors have in common


def test_an_input_changed_in_place_is_changed_for_the_caller(changing: CallDispatcher):
    assert changing.calls[0].spec.mutates == (0,)
    for make in (
        lambda: torch.ones(4, 6),
        lambda: torch.ones(4, 12)[:, ::2],
        lambda: torch.ones(6, 4).t(),
        lambda: torch._neg_view(torch.ones(4, 6)),
    ):
        x, twin, y = make(), make(), torch.randn(4, 6)
        same(changing(x, y), Added()(twin, y))
        torch.testing.assert_close(x, twin)


def test_a_change_through_a_view_is_seen():
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    dispatcher = dispatcher_of(Changing(), x, y)
    assert dispatcher.calls[0].spec.mutates == (0,)
    twin = x.clone()
    same(dispatcher(x, y), Changing()(twin, y))
    torch.testing.assert_close(x, twin)


def test_a_copy_that_is_changed_is_no_input_that_is_changed():
    dispatcher = dispatcher_of(Calls(lambda x: x.clone().add_(1)), torch.randn(4))
    assert dispatcher.calls[0].spec.mutates == ()


def test_a_change_that_another_input_sees_is_left_to_the_original(changing: CallDispatcher):
    x = torch.randn(8, 6)
    with pytest.raises(WorkloadError, match="share memory"):
        changing(x[:4], x[2:6])
    changing(x[:4], x[4:])  # neighbours
    own = CallDispatcher(changing.calls, original=Added())
    twin = x.clone()
    with pytest.warns(SlowerCall, match="original"):
        same(own(x[:4], x[:4]), Added()(twin[:4], twin[:4]))
    torch.testing.assert_close(x, twin)


def test_inputs_that_are_one_tensor_or_parts_of_one():
    model = Calls(lambda x, y: x @ y.t() - y)
    dispatcher = dispatcher_of(model, torch.randn(4, 4), torch.randn(4, 4))
    x = torch.randn(8, 4)
    for pair in ((x[:4], x[:4]), (x[:4], x[2:6]), (x[::2], x[1::2]), (x[:4], x[:4].t())):
        same(dispatcher(*pair), model(*pair))
    twice = dispatcher_of(model, x[:4], x[:4])
    same(twice(x[:4], x[4:]), model(x[:4], x[4:]))


def test_an_input_may_change_after_the_call(picture: CallDispatcher):
    x, scale = torch.randn(2, 3, 8, 6), torch.randn(5)
    found, wanted = picture(x, scale), Picture()(x, scale)
    x.zero_()
    same(found, wanted)
    again = picture(torch.randn(2, 3, 8, 6), scale)
    assert all(again[name].data_ptr() != found[name].data_ptr() for name in ("last", "flat"))
    same(found, wanted)


# ---------------------------------------------------------------------------------------------- containers


def test_dictionaries_in_any_order_and_of_any_kind():
    model = Calls(lambda d: d["a"] - 2 * d["b"])
    a, b = torch.randn(3), torch.randn(3)
    for made in ({"a": a, "b": b}, OrderedDict(a=a, b=b)):
        dispatcher = dispatcher_of(model, made)
        for given in ({"b": b, "a": a}, {"a": a, "b": b}, OrderedDict(b=b, a=a), OrderedDict(a=a, b=b)):
            same(dispatcher(given), model(given))
    with pytest.raises(WorkloadError):
        dispatcher({"a": a, "b": b, "c": a})


def test_keys_that_are_no_text():
    model = Calls(lambda d: d[1] - 2 * d["1"])
    a, b = torch.randn(3), torch.randn(3)
    same(dispatcher_of(model, {1: a, "1": b})({"1": b, 1: a}), a - 2 * b)


def test_lists_tuples_and_named_tuples():
    model = Calls(lambda pair, rest: pair.first * rest[0][0] - pair.second)
    a, b, c = torch.randn(3), torch.randn(3), torch.randn(3)
    dispatcher = dispatcher_of(model, Pair(a, b), [(c,), 2])
    same(dispatcher(Pair(b, c), [(a,), 2]), model(Pair(b, c), [(a,), 2]))
    for other in ((Pair(a, b), [(c,), 3]), ((a, b), [(c,), 2]), (Pair(a, b), ((c,), 2))):
        with pytest.raises(WorkloadError, match="compiled for other calls"):
            dispatcher(*other)


def test_containers_that_differ_in_names_only_are_told_apart():
    from transformers.modeling_outputs import BaseModelOutput

    model = Calls(lambda o: o.last_hidden_state * 2)
    x = torch.randn(3)
    dispatcher = dispatcher_of(model, BaseModelOutput(last_hidden_state=x))
    same(dispatcher(BaseModelOutput(last_hidden_state=x + 1)), (x + 1) * 2)
    with pytest.raises(WorkloadError):
        dispatcher(BaseModelOutput(hidden_states=x))  # pyright: ignore[reportArgumentType]


# ----------------------------------------------------------------------------------------------- constants


def test_constants_are_what_they_were_or_another_call():
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, by: float = 0.0, mode: str = "a", kind: Any = torch.float32):
            return x / by if by or mode == "b" else x

    x = torch.ones(3)
    dispatcher = dispatcher_of(Scaled(), x, original=Scaled())
    for call in (
        lambda m: m(x),
        lambda m: m(x, 0.0),
        lambda m: m(x=x, by=0.0, mode="a"),
        lambda m: m(x, 0.0, "a", torch.float32),
    ):
        same(call(dispatcher), x)
    with pytest.warns(SlowerCall):
        same(dispatcher(x, -0.0, "b"), x / -0.0)
    strict = dispatcher_of(Scaled(), x, strict=True)
    strict(x)
    for odd in (-0.0, 0, False, float("nan")):
        with pytest.raises(WorkloadError):
            strict(x, odd)


def test_many_kinds_of_calls_take_no_more_memory():
    model = Calls(lambda x, n=0: x * 2)
    dispatcher = dispatcher_of(model, torch.ones(3), original=model)
    dispatcher.remembered = 8
    with pytest.warns(SlowerCall) as said:  # noqa: PT031
        for number in range(30):
            same(dispatcher(torch.ones(3), number), torch.ones(3) * 2)
    assert len(dispatcher._known) <= 8
    assert len(said) == 1


@pytest.mark.parametrize("how", ["jit.trace", "jit.script", "vmap", "jacrev", "symbolic_trace"])
def test_tracers_are_refused_in_words(dense: CallDispatcher, how: str):
    from torchwright.optimization.engines.dispatch.module import OptimizedModule

    x = torch.randn(4, 16)
    model = nn.Sequential(OptimizedModule(dense))
    ask: dict[str, Callable[[], Any]] = {
        "jit.trace": lambda: torch.jit.trace(model, x),
        "jit.script": lambda: torch.jit.script(model),
        "vmap": lambda: torch.vmap(dense)(x[None]),
        "jacrev": lambda: torch.func.jacrev(dense)(x),
        "symbolic_trace": lambda: torch.fx.symbolic_trace(model),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its own jit is no longer to be used
        with pytest.raises(TorchwrightError, match="cannot look into an optimized model"):
            ask[how]()


def test_a_call_with_names_that_no_signature_has_is_no_crash():
    model = Calls(lambda x, **more: x * 2)
    dispatcher = CallDispatcher(
        [call_of(model, (torch.ones(3),))], takes=InputCapabilities(parameters=parameters_of(model.forward))
    )
    with pytest.raises(WorkloadError):
        dispatcher(torch.ones(3), y=3)
    with pytest.raises(WorkloadError):
        dispatcher()


# ------------------------------------------------------------------------------------------- numbers of rows


def test_the_call_that_was_quickest_for_so_many_rows_goes_before_the_others():
    """Each of the calls answers with its own number."""
    numbered = [Calls(lambda x, n=n: x * 0 + n) for n in range(4)]
    x = torch.ones(4, 3)
    fixed, free, one = (
        call_of(model, (given,), free=sizes)
        for model, given, sizes in zip(
            numbered, (x, x, x[:1]), (None, FreeSizes(rows=(0,)), None), strict=False
        )
    )
    general = call_of(numbered[3], (x,), free=FreeSizes())
    for name, call in (("fixed", fixed), ("free", free), ("one", one), ("general", general)):
        call.spec = replace(call.spec, name=name)
    by_rows = ((1, "one"), (2, "general"), (3, "fixed"), (5, "free"), (7, "gone"), (9, "general"))
    dispatcher = CallDispatcher(
        [fixed, free, one],
        general=[general],
        takes=InputCapabilities(parameters=parameters_of(numbered[0].forward), batched=(0,), pieces=True),
        by_rows=by_rows,
    )
    with warnings.catch_warnings(action="ignore"):
        for rows, answered in ((1, 2), (2, 3), (3, 0), (4, 0), (5, 1), (6, 1), (7, 1), (9, 3), (20, 3)):
            given = torch.ones(rows, 3)
            assert (dispatcher(given) == answered).all(), rows
            call, _ = dispatcher.result_of((given,), {}) or (None, [])
            assert call is (fixed, free, one, general)[answered]
    strict = CallDispatcher(
        [fixed, free, one], general=[general], takes=dispatcher.takes, by_rows=by_rows, strict=True
    )
    assert (strict(torch.ones(3, 3)) == 1).all()
    assert (strict(torch.ones(9, 3)) == 1).all()


def test_tensors_of_another_device_are_brought_to_the_general_call():
    """The call of other batch sizes goes operator by operator: mixed devices would fail in its first operator."""
    model, x = mlp(), torch.randn(4, 16)
    fixed, general = call_of(model, (x,)), call_of(model, (x,), free=FreeSizes(rows=(0,)))
    given: list[torch.Tensor] = []

    def run(tensors: list[torch.Tensor]) -> torch.Tensor:
        given.extend(tensors)
        return torch.zeros(3, 8)

    general.run = run
    takes = InputCapabilities(parameters=parameters_of(model.forward))
    dispatcher = CallDispatcher([fixed], general=[general], takes=takes, device="meta")
    with warnings.catch_warnings(action="ignore"):
        assert dispatcher(x[:3]).device.type == "cpu"
    assert [(tensor.device.type, tuple(tensor.shape)) for tensor in given] == [("meta", (3, 16))]
