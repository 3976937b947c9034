"""Calls as plain data, rows in pieces, and what an artifact takes once it is loaded."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchwright as tw
from engine_calls import Calls, Picture, call_of
from in_process import trials_in_process
from torchwright.core.errors import ArtifactError, SlowerCall, TorchwrightError
from torchwright.core.json_file import typed
from torchwright.core.process.limits import TimeIsUp
from torchwright.optimization.artifact.folder import GENERAL, ONE, ROWS
from torchwright.optimization.engines.compiled.package import Package
from torchwright.optimization.engines.compiled.program import (
    FreeSizes,
    compile_program,
    export_one,
    read_programs,
    write_programs,
)
from torchwright.optimization.engines.dispatch.call import Binder, numbered, parameters_of, spec_of
from torchwright.optimization.engines.dispatch.call_dispatcher import CallDispatcher
from torchwright.optimization.engines.dispatch.results import laid_out, layout_of
from torchwright.optimization.engines.dispatch.spec import InputCapabilities, TensorSpec
from torchwright.optimization.trial import batch_variants
from torchwright.workloads.base import Case
from torchwright.workloads.rows import Pieces

quick = settings(max_examples=60, derandomize=True, deadline=None)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


# ------------------------------------------------------------------------------------------ as plain data


def kept(value: Any) -> Any:
    """As an artifact keeps it and reads it again."""
    return typed(json.loads(json.dumps(asdict(value))), type(value), "a test")


@pytest.mark.parametrize(
    ("model", "args", "free"),
    [
        (Picture(), (torch.randn(2, 3, 8, 6).to(memory_format=torch.channels_last), torch.randn(5)), None),
        (
            Calls(lambda d, *rest: (d["a"][1] + rest[0], "text", 1.5)),
            ({"a": (2, torch.ones(3))}, torch.ones(3)),
            None,
        ),
        (Calls(lambda d: d[1] + d["1"]), ({1: torch.ones(3), "1": torch.ones(3)},), None),
        (Calls(lambda x: (x.add_(1), x.shape[0])), (torch.randn(4, 5),), FreeSizes(rows=(0,))),
        (nn.Linear(4, 2), (torch.randn(3, 4),), FreeSizes()),
    ],
)
def test_what_a_call_takes_is_the_same_once_it_is_read(model: nn.Module, args: Any, free: Any):
    spec = call_of(model, args, free=free).spec
    assert kept(spec) == spec
    takes = InputCapabilities(parameters=parameters_of(model.forward), batched=(0,), pieces=True)
    assert kept(takes) == takes
    Binder(kept(takes).parameters)


def test_parameters_that_are_none_are_refused():
    for parameter in ({"name": "1x", "kind": "KEYWORD_ONLY"}, {"name": "x", "kind": "SIDEWAYS"}):
        data = asdict(InputCapabilities()) | {"parameters": [parameter | {"default": None}]}
        with pytest.raises(ArtifactError):
            Binder(typed(data, InputCapabilities, "a test").parameters)


def test_defaults_that_no_data_can_say():
    def forward(x: Any, a: Any = None, b: Any = (1, 2), *, c: Any = torch.float32) -> None: ...

    assert [p.default for p in parameters_of(forward)] == [None, "None", "…", "torch.float32"]
    Binder(parameters_of(forward))


# ----------------------------------------------------------------------------------------------- arguments

NAMES = "abcde"
VALUES = st.sampled_from([0, 1, None, True, "text"])


@st.composite
def signatures(draw: st.DrawFn) -> inspect.Signature:
    kinds = sorted(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4]), max_size=5)))
    for single in (2, 4):
        while kinds.count(single) > 1:
            kinds.remove(single)
    found, defaulted = [], False
    for name, kind in zip(NAMES, kinds, strict=False):
        has = (kind in (0, 1) and defaulted) or (kind in (0, 1, 3) and draw(st.booleans()))
        defaulted = defaulted or (has and kind != 3)
        default = draw(VALUES) if has else inspect.Parameter.empty
        found.append(inspect.Parameter(name, list(inspect._ParameterKind)[kind], default=default))
    return inspect.Signature(found)


CALLS = st.tuples(
    st.lists(st.one_of(VALUES, st.just("tensor")), max_size=4),
    st.dictionaries(st.sampled_from(NAMES + "z"), st.one_of(VALUES, st.just("tensor")), max_size=4),
)


def filled_in(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any] | None:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return bound.arguments


@quick
@given(signatures(), CALLS, CALLS)
def test_calls_are_one_where_python_binds_them_alike(signature: inspect.Signature, one: Any, other: Any):
    """By name, by position, with defaults left out or given."""

    class Original:
        __signature__ = signature

        def __call__(self) -> None: ...

    def with_tensors(call: Any) -> tuple[Any, Any]:
        make = lambda v: torch.zeros(1) if v == "tensor" else v
        return [make(v) for v in call[0]], {k: make(v) for k, v in call[1].items()}

    def structure(call: Any) -> tuple[Any, Any]:
        counter = [0]
        args, kwargs = with_tensors(call)
        return numbered(tuple(args), counter), numbered(kwargs, counter)

    a, b = structure(one), structure(other)
    order = Binder(parameters_of(Original())).place({"tuple": list(a)}, *b)
    bound = [filled_in(signature, *call) for call in (one, other)]
    text = lambda call: None if call is None else {k: repr(v) for k, v in call.items()}
    alike = text(bound[0]) == text(bound[1]) if None not in bound else repr(one) == repr(other)
    if None in bound and not alike:
        alike = one[0] == other[0] and repr(sorted(one[1].items())) == repr(sorted(other[1].items()))
    assert (order is not None) == alike
    if order is not None:
        assert sorted(order) == list(range(len(order)))


# ------------------------------------------------------------------------------------- layouts and pieces


@quick
@given(st.permutations(range(4)), st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_strides_of_any_order_are_those_of_torch(order: list[int], shape: list[int]):
    dense = torch.randn([shape[dim] for dim in order])
    back = sorted(range(4), key=lambda place: order[place])
    tensor = dense.permute(back)
    spec = TensorSpec(dtype="float32", shape=tuple(shape), order=tuple(order))
    for wanted, found, size in zip(tensor.stride(), spec.strides(shape), shape, strict=True):
        assert size == 1 or wanted == found
    mended = laid_out(lambda outputs: outputs[0], [tuple(order)])(
        [tensor.clone(memory_format=torch.contiguous_format)]
    )
    torch.testing.assert_close(mended, tensor)
    assert [s for s, n in zip(mended.stride(), shape, strict=True) if n > 1] == [
        s for s, n in zip(tensor.stride(), shape, strict=True) if n > 1
    ]
    assert layout_of(mended) == layout_of(tensor) or 1 in shape


@quick
@given(st.integers(0, 23), st.integers(2, 7), st.sampled_from(["dense", "strided", "expanded"]))
def test_pieces_answer_as_the_whole(rows: int, B: int, layout: str):
    x = {"dense": torch.randn(rows, 3), "strided": torch.randn(rows, 6)[:, ::2]}.get(
        layout, torch.randn(1, 3).expand(rows, 3)
    )
    weight, sizes = torch.randn(3, 3), []

    def model(tensors: list[torch.Tensor]) -> Any:
        w, x, y = tensors
        sizes.append(len(x))
        picture = (x[:, :, None, None] * torch.ones(2, 2)).contiguous(memory_format=torch.channels_last)
        return {"a": x @ w + y, "n": 3, "b": (x.t().contiguous().t(), picture), "flag": x[:, 0] > 0}

    y = torch.randn(rows, 1)
    found, wanted = Pieces(model, (1, 2), B)([weight, x, y]), model([weight, x, y])
    assert set(sizes[:-1]) == {B}
    assert len(sizes) - 1 == max(1, -(-rows // B))
    assert found["n"] == 3
    for a, b in zip(
        (found["a"], found["flag"], *found["b"]), (wanted["a"], wanted["flag"], *wanted["b"]), strict=True
    ):
        torch.testing.assert_close(a, b, **CLOSE)
        assert a.dtype == b.dtype
        assert a.numel() == 0 or [s for s, n in zip(a.stride(), a.shape, strict=True) if n > 1] == [
            s for s, n in zip(b.stride(), b.shape, strict=True) if n > 1
        ]


# ------------------------------------------------------------------------------------------- other numbers


@pytest.mark.parametrize("B", [2, 3, 64])
def test_a_free_number_of_rows_has_its_bounds(B: int):
    call = call_of(nn.Linear(4, 2), (torch.randn(3, 4),), free=FreeSizes(rows=(0,)))
    assert call.spec.bind([(B, 4)]) is not None
    assert (
        call.spec.bind([(1, 4)]) is None
    )  # which the graph was not made for; who has tried it says otherwise
    assert call.spec.bind([(B, 5)]) is None


class Named(nn.Module):
    """Takes whatever is named, as a wrapper of another module does."""

    def forward(self, *args: Any, **kwargs: torch.Tensor) -> torch.Tensor:
        return torch.relu(kwargs["one"] @ kwargs["other"].T)


@pytest.mark.parametrize("free", [FreeSizes(rows=(0,)), FreeSizes()], ids=["rows", "any"])
def test_sizes_of_arguments_by_any_name_are_free(free: FreeSizes):
    """Every artifact in autocast of a model that is called by keywords took the example's sizes alone."""
    model, given = Named(), {"one": torch.randn(4, 8), "other": torch.randn(3, 8)}
    program = export_one(model, Case(name="it", kwargs=given), free)
    others = {"one": torch.randn(7, 8), "other": torch.randn(3, 8)}
    torch.testing.assert_close(program.module()(**others), model(**others))
    assert "forward" not in vars(model)


def test_a_graph_whose_sizes_do_not_fit_names_them():
    pairs = Calls(lambda x: x.view(x.shape[0] // 2, 2, -1).sum(1))
    general = call_of(pairs, (torch.randn(4, 6),), free=FreeSizes())
    dispatcher = CallDispatcher([], general=[general])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowerCall)
        x = torch.randn(8, 5)
        torch.testing.assert_close(dispatcher(x), pairs(x))
        with pytest.raises((TorchwrightError, RuntimeError)):
            dispatcher(torch.randn(5, 6))
        own = CallDispatcher([], general=[general], original=Calls(lambda x: x))
        x = torch.randn(5, 6)
        assert own(x) is x


@pytest.mark.slow
def test_graphs_that_are_compiled_again_read_the_layout_they_were_made_for(tmp_path: Path):
    """A channels-last example, kept in a file and compiled from there."""
    x, scale = torch.randn(2, 3, 8, 6).to(memory_format=torch.channels_last), torch.randn(5)
    write_programs(tmp_path, {"forward": export_one(Picture(), Case("forward", args=(x, scale)), None)})
    program = read_programs(tmp_path)["forward"]
    spec = spec_of("forward", program)
    compile_program(program, tmp_path / "again.pt2", {})
    dispatcher = CallDispatcher([Package(tmp_path / "again.pt2", spec)])
    for given_x in (x, x.contiguous(), x.transpose(2, 3).contiguous().transpose(2, 3)):
        found, wanted = dispatcher(given_x, scale), Picture()(given_x, scale)
        torch.testing.assert_close(found["last"], wanted["last"].detach(), **CLOSE)
        torch.testing.assert_close(found["pair"][0], wanted["pair"][0], **CLOSE)


@pytest.mark.parametrize(
    ("found", "ranges"),
    [
        ({8: "fixed", 1: "graph", 4: "graph", 16: "fixed", 12: "fixed"}, ((1, "graph"), (8, "fixed"))),
        (
            {8: "fixed", 1: "one", 2: "graph", 16: "free"},
            ((1, "one"), (2, "graph"), (8, "fixed"), (9, "free")),
        ),
        ({8: "fixed", 12: "graph", 16: "free"}, ((8, "fixed"), (9, "graph"), (16, "free"))),
    ],
)
def test_what_was_quickest_at_some_numbers_of_rows_is_taken_between_them(found: Any, ranges: Any):
    assert batch_variants._ranges(found, example=8) == ranges


class Doubled(nn.Module):
    """Any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.slow
def test_graphs_answer_other_numbers_of_rows_in_pieces_where_no_other_export_was_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Swin takes minutes to export with every size free; its batches are to be answered all the same."""
    real = batch_variants.export_one

    def without_end(model: nn.Module, case: Case, free: FreeSizes | None) -> Any:
        if free == FreeSizes():
            raise TimeIsUp
        return real(model, case, free)

    trials_in_process(monkeypatch, 2.0)
    monkeypatch.setattr(batch_variants, "export_one", without_end)
    model, x = Doubled().eval(), torch.randn(4, 16)
    artifact = tw.optimize(model, x, techniques=["dtype"], max_drop=0.05, time_budget=600).save(
        tmp_path / "artifact"
    )
    loaded = tw.load(artifact)
    assert loaded.how == "graphs, uncompiled"
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        for count in (1, 3, 4, 9):
            x = torch.randn(count, 16)
            torch.testing.assert_close(loaded.model(x), model(x), rtol=0.05, atol=0.05)


EXAMPLE = "forward"
"""The name of the example's call."""


@pytest.mark.parametrize(
    ("quickest", "rows", "packages", "by_rows"),
    [
        pytest.param(
            {1: GENERAL, 2: GENERAL, 12: GENERAL},
            "pieces",
            ["package-0.pt2"],
            ((1, GENERAL), (4, EXAMPLE), (9, GENERAL), (16, EXAMPLE)),
            id="by the graph where nothing is compiled for them and padding takes longer",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {1: ROWS, 2: ROWS, 4: ROWS, 12: ROWS},
            "both",
            ["package-0.pt2", "package-rows.pt2"],
            ((1, ROWS), (8, EXAMPLE), (9, ROWS), (16, EXAMPLE)),
            id="by the package for any number",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {1: ONE, 2: ROWS},
            "both",
            ["package-0.pt2", "package-one.pt2", "package-rows.pt2"],
            ((1, ONE), (2, ROWS), (4, EXAMPLE)),
            id="by one for a single row",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_was_quickest_answers_other_numbers_of_rows(
    quickest: dict[int, str],
    rows: str,
    packages: list[str],
    by_rows: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    """The clock is made up: one row is slower than the original in whatever form but its own package."""

    def shares(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
        count = len(next(iter(calls.values()))())
        named = quickest.get(count, EXAMPLE if count != 8 else "")
        return {name: 0.5 if name == named else 2.0 for name in calls}

    trials_in_process(monkeypatch, 2.0)
    monkeypatch.setattr(batch_variants, "ROWS_COST", 1.03)
    monkeypatch.setattr(batch_variants, "_time_ratios", shares)
    if ROWS not in quickest.values():
        monkeypatch.setattr("torchwright.optimization.proof.forms._room", lambda search: 0.0)
    model, x = Doubled().eval(), torch.randn(8, 16)
    found = tw.optimize(model, x, techniques=["compile"], max_drop=0.05, time_budget=600)
    artifact = found.save(tmp_path / "artifact")
    manifest = json.loads((artifact / "manifest.json").read_text())
    assert manifest["rows"] == rows
    assert tuple(map(tuple, manifest["by_rows"])) == by_rows
    assert sorted(path.name for path in (artifact / "native").glob("*.pt2")) == packages
    loaded = tw.load(artifact).model
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        for count in (1, 2, 3, 4, 8, 9, 12, 16, 17, 0):
            x = torch.randn(count, 16)
            torch.testing.assert_close(loaded(x), model(x), **CLOSE)


def test_a_model_that_takes_one_number_of_rows_is_not_timed_at_others():
    def only_four(x: torch.Tensor) -> torch.Tensor:
        assert len(x) == 4
        return x

    case = Case("forward", args=(torch.randn(3, 2),))
    assert batch_variants._candidates(Calls(only_four), {}, case) == {}


# ------------------------------------------------------------------------------------- whole, as users have it


class Rows(nn.Module):
    """Takes its rows apart by a number of its own, so that torch.export cannot leave it free."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> dict[str, torch.Tensor]:
        y = torch.stack([self.linear(row) for row in x]) if len(x) else self.linear(x)
        return {"y": y * scale, "t": y.t().contiguous().t()}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        trials_in_process(patch, 2.0, cache=folder / "cache")
        found = tw.optimize(
            Rows(), torch.randn(4, 16), techniques=["compile"], max_drop=0.05, time_budget=600
        )
        found.model
        loaded = tw.load(found.save(folder / "artifact"))
        with_original = tw.load(folder / "artifact", original=Rows())
        strict = tw.load(folder / "artifact", on_new_shape="error")
    return {
        "result": found.model,
        "loaded": loaded.model,
        "original": with_original.model,
        "strict": strict.model,
    }


CALLERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "by position": lambda m, x: m(x),
    "by name": lambda m, x: m(x=x),
    "with its default": lambda m, x: m(x, 2.0),
    "with its default by name": lambda m, x: m(scale=2.0, x=x),
}


@pytest.mark.slow
@pytest.mark.parametrize("who", ["result", "loaded", "original"])
@pytest.mark.parametrize("how", CALLERS)
def test_rows_that_export_holds_fast_are_answered_in_pieces(result: Any, who: str, how: str):
    model = result[who]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowerCall)
        for rows in (4, 1, 2, 8, 3, 0, 11):
            for x in (torch.randn(rows, 16), torch.randn(16, rows).t(), torch.randn(2 * rows, 32)[::2, ::2]):
                found, wanted = CALLERS[how](model, x), Rows()(x)
                assert list(found) == list(wanted)
                torch.testing.assert_close(found["y"], wanted["y"].detach(), **CLOSE)


@pytest.mark.slow
def test_what_is_left_the_original_answers_where_it_is_given(result: Any):
    x = torch.randn(4, 16)
    for who in ("result", "original"):
        with pytest.warns(SlowerCall, match="the original, since"):
            found = result[who](x, scale=3.0)
        torch.testing.assert_close(found["y"], Rows()(x, 3.0)["y"].detach(), **CLOSE)
        assert not found["y"].requires_grad
    with pytest.raises(TorchwrightError, match=r"compiled for other calls.*original=MODEL"):
        result["loaded"](x, scale=3.0)
    result["strict"](x)
    for call in (lambda m: m(x[:3]), lambda m: m(x, 3.0), lambda m: m(x.double())):
        with pytest.raises(TorchwrightError, match="compiled for other calls"):
            call(result["strict"])


class Convolutions(nn.Module):
    """Takes pictures of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, 1, 1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layers(image).mean((2, 3))


@pytest.mark.slow
def test_sizes_that_the_caller_names_vary_and_other_pictures_go_a_slower_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """`dynamic=` in torch.export's form leaves the height free; the width is free in the graph alone."""
    trials_in_process(monkeypatch, 2.0)
    torch.manual_seed(0)
    model = Convolutions().eval()
    height = torch.export.Dim("height", min=8, max=64)
    for dynamic in ({"image": {2: height}}, None):
        result = tw.optimize(
            model,
            torch.randn(2, 3, 16, 16),
            techniques=["compile"],
            max_drop=0.05,
            time_budget=600,
            dynamic=dynamic,
        )
        loaded = tw.load(result.path, on_new_shape="error" if dynamic else "run").model
        other = torch.randn(2, 3, 32, 16)
        with torch.no_grad(), warnings.catch_warnings(action="ignore" if dynamic is None else "error"):
            torch.testing.assert_close(loaded(other), model(other), rtol=1e-3, atol=1e-4)
        if dynamic is None:
            with torch.no_grad(), warnings.catch_warnings(action="ignore"):
                wide = torch.randn(5, 3, 24, 40)
                torch.testing.assert_close(loaded(image=wide), model(wide), rtol=1e-3, atol=1e-4)
        else:
            with pytest.raises(TorchwrightError, match="compiled for other calls"):
                loaded(torch.randn(2, 3, 16, 24))
