"""Contract tests of every registered engine; an engine that cannot run here only gives its reason."""

from __future__ import annotations

import copy
import pickle
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from torchwright.core import nested
from torchwright.core.errors import ArtifactError, RefusedTechnique, TorchwrightError, WorkloadError
from torchwright.core.records import Step
from torchwright.optimization.artifact.load import Loaded, load
from torchwright.optimization.engines.base import Engine, ShippingForm, engines
from torchwright.optimization.engines.dispatch.input_capabilities import tensors_of, with_tensors
from torchwright.optimization.techniques.base import techniques
from torchwright.testing.examples import example
from torchwright.testing.forks import check_in_child
from torchwright.testing.models import Counter, Numbers, Parts, Perceptron
from torchwright.testing.rows import check_rows
from torchwright.testing.shipped import Ready, RunsBy, prepared, ship
from torchwright.workloads.base import Case, Workload
from torchwright.workloads.module import ModuleWorkload

NAMES = engines.names()
ERROR = 1e-3
"""Relative, of sums in another order."""
quietly = pytest.mark.filterwarnings("ignore")  # in a trial's process nobody sees what libraries say
Make = Callable[[Path], tuple[Workload, list[Step]]]


def perceptron(folder: Path) -> tuple[Workload, list[Step]]:
    torch.manual_seed(0)
    return ModuleWorkload(Perceptron(), torch.randn(8, 64)), []


def parts(folder: Path) -> tuple[Workload, list[Step]]:
    torch.manual_seed(0)
    inputs = {"x_BCHW": torch.randn(4, 3, 8, 8), "scale_C": torch.rand(8)}
    return ModuleWorkload(Parts(), inputs), []


def language(folder: Path) -> tuple[Workload, list[Step]]:
    return example("language", folder), [Step(name="native")]


def speech(folder: Path) -> tuple[Workload, list[Step]]:
    return example("speech", folder), [Step(name="native_speech")]


def seq2seq(folder: Path) -> tuple[Workload, list[Step]]:
    return example("seq2seq", folder), [Step(name="native_seq2seq")]


def vision_language(folder: Path) -> tuple[Workload, list[Step]]:
    return example("vision_language", folder), [Step(name="native_vision")]


MAKERS: dict[str, Make] = {"perceptron": perceptron, "parts": parts}
OWN_MAKERS: dict[str, dict[str, Make]] = {
    "native": {"language": language},
    "native_speech": {"speech": speech},
    "native_seq2seq": {"seq2seq": seq2seq},
    "native_vision": {"vision_language": vision_language},
}
"""Models for engines that run one kind only."""
PAIRS = [(name, model) for name in NAMES for model in OWN_MAKERS.get(name, MAKERS)]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """An engine with a model, and where its artifacts are written."""

    ready: Ready
    folder: Path
    shipped: dict[ShippingForm, Path]
    models: list[Any] = field(default_factory=list[Any])
    """The artifacts' models, loaded once: some compile at their first call."""

    @property
    def case(self) -> Case:
        """A call with values that the engine has not seen."""
        case = self.ready.workload.cases(self.ready.target.compute_dtype)[0]
        torch.manual_seed(1)
        return with_tensors(case, [_other(tensor) for tensor in tensors_of(case)])

    def expected(self, case: Case) -> Any:
        """Return the original's answer, or the prepared model's if the steps change numbers."""
        own = with_tensors(case, [tensor.clone() for tensor in tensors_of(case)])
        ready = self.ready
        model = ready.workload.build() if isinstance(ready.workload, ModuleWorkload) else ready.target.model
        with torch.inference_mode():
            return model(*own.args, **own.kwargs)

    def loaded(self, way: ShippingForm) -> Loaded:
        if way not in self.shipped:
            self.shipped[way] = ship(self.ready, way, self.folder / way)
        own = self.ready.workload.build() if way == "module" else None
        return load(self.shipped[way], model=own, trust=True)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """`RunsBy` among the techniques, for as long as these tests last."""
    with pytest.MonkeyPatch.context() as patch:
        techniques.names()
        patch.setitem(techniques._targets, RunsBy.name, f"{RunsBy.__module__}:RunsBy")
        yield


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    name, model = request.param
    _skip_where_unavailable(name)
    folder = tmp_path_factory.mktemp("engine")
    (folder / "prepared").mkdir()
    workload, steps = OWN_MAKERS.get(name, MAKERS)[model](folder)
    steps = steps or [Step(name=RunsBy.name, options={"engine": name})]
    torch.compiler.reset()
    try:
        ready = prepared(workload, steps, name, folder / "prepared")
        case = workload.cases(ready.target.compute_dtype)[0]
        alike = with_tensors(case, [_other(tensor) for tensor in tensors_of(case)])
        with torch.inference_mode():
            ready.engine(case)
            ready.engine.check()
            before = ready.engine.recompiles()
            ready.engine(alike)
            assert ready.engine.recompiles() == before, "calls that look alike compile nothing again"
    except RefusedTechnique as refusal:
        _check_words(refusal.reason)
        pytest.skip(f"{name} refuses this model: {refusal.reason}")
    return Prepared(ready=ready, folder=folder, shipped={})


@pytest.mark.parametrize("name", NAMES)
class TestDeclaration:
    def test_it_says_what_it_is(self, name: str) -> None:
        cls = engines.get(name)
        assert issubclass(cls, Engine)
        assert cls.name == name
        assert (cls.__doc__ or "").strip().endswith(".")
        assert cls.how.strip()

    def test_its_ways_are_run_by_engines(self, name: str) -> None:
        for own in typing.cast("list[ShippingForm]", ["rebuild", "module"]):
            ways = engines.get(name).ways(own)
            assert ways
            assert ways.keys() <= set(get_args(ShippingForm)) - ({"rebuild", "module"} - {own})
            assert set(ways.values()) <= set(NAMES)

    def test_files_of_its_cache_are_plain_names(self, name: str) -> None:
        assert all(Path(file).name == file for file in engines.get(name).cache)

    def test_a_reason_is_in_words(self, name: str) -> None:
        cls = engines.get(name)
        reason = cls.unavailable()
        if reason is None:
            assert cls.available("this", ArtifactError) is cls
            return
        _check_words(reason)
        with pytest.raises(ArtifactError, match="which cannot run here") as refused:
            cls.available("this", ArtifactError)
        assert refused.value.found == reason


@quietly
@pytest.mark.parametrize("name", NAMES)
def test_what_changes_its_inputs_is_refused_or_changes_them(name: str, tmp_path: Path) -> None:
    _skip_where_unavailable(name)
    if name in OWN_MAKERS:
        pytest.skip("it runs models of its own kind")
    torch.manual_seed(0)
    x, seen = torch.randn(4, 6), torch.zeros(6)
    steps = [Step(name=RunsBy.name, options={"engine": name})]
    try:
        ready = prepared(ModuleWorkload(Counter(), (x, seen)), steps, name, tmp_path)
    except RefusedTechnique as refusal:
        _check_words(refusal.reason)
        return
    own = seen.clone()
    with torch.inference_mode():
        ready.engine(Case(name="forward", args=(x, own), fixed=True))
    torch.testing.assert_close(own, x.sum(0))


NUMBERS: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    "NaN": lambda t: [_with_value(t[0], torch.nan), *t[1:]],
    "infinity": lambda t: [_with_value(t[0], torch.inf), *t[1:]],
    "negative infinity": lambda t: [_with_value(t[0], -torch.inf), *t[1:]],
    "subnormal": lambda t: [t[0] * 1e-42, *t[1:]],
    "large integers": lambda t: [t[0], t[1], t[2] + 2**40],
    "the least integer": lambda t: [t[0], t[1], _with_value(t[2], -(2**63))],
    "an index too large": lambda t: [t[0], _with_value(t[1], 100), t[2]],
    "a negative index": lambda t: [t[0], _with_value(t[1], -1), t[2]],
}
"""Inputs for which an engine may compute something else."""


@pytest.fixture(scope="module", params=[name for name in NAMES if name not in OWN_MAKERS])
def numbers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    _skip_where_unavailable(request.param)
    torch.manual_seed(0)
    inputs = torch.randn(4, 8), torch.randint(0, 100, (4, 3)), torch.randint(0, 10_000, (4, 3))
    folder = tmp_path_factory.mktemp("numbers")
    (folder / "prepared").mkdir()
    steps = [Step(name=RunsBy.name, options={"engine": request.param})]
    try:
        ready = prepared(ModuleWorkload(Numbers(), inputs), steps, request.param, folder / "prepared")
    except RefusedTechnique as refusal:
        pytest.skip(f"{request.param} refuses this model: {refusal.reason}")
    return Prepared(ready=ready, folder=folder, shipped={})


@quietly
@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_are_pytorchs_or_an_error_says_why(numbers: Prepared, kind: str) -> None:
    """Also those that the example did not hold."""
    case = numbers.ready.workload.cases(torch.float32)[0]
    case = with_tensors(case, NUMBERS[kind](tensors_of(case)))
    try:
        expected = numbers.expected(case)
    except IndexError:
        with torch.inference_mode(), pytest.raises((IndexError, RuntimeError, TorchwrightError)):
            numbers.ready.engine(case)
        return
    with torch.inference_mode():
        found = numbers.ready.engine(case)
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, equal_nan=True, rtol=1e-3, atol=1e-5, msg=name)


@quietly
class TestEngine:
    @torch.inference_mode()
    def test_it_answers_as_the_model_does(self, engine: Prepared) -> None:
        case = engine.case
        check_same(engine.expected(case), engine.ready.engine(case))

    @torch.inference_mode()
    def test_inputs_and_earlier_answers_are_left_alone(self, engine: Prepared) -> None:
        case = engine.case
        before = [tensor.clone() for tensor in tensors_of(case)]
        first = engine.ready.engine(case)
        kept = [leaf.clone() for leaf in _tensors(first)]
        engine.ready.engine(with_tensors(case, [_other(tensor) for tensor in tensors_of(case)]))
        assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(case), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(kept, _tensors(first), strict=True))

    @torch.inference_mode()
    def test_it_takes_tensors_that_lie_otherwise_in_memory(self, engine: Prepared) -> None:
        case = engine.case
        strided = with_tensors(case, [_strided(tensor) for tensor in tensors_of(case)])
        check_same(engine.expected(case), engine.ready.engine(strided))

    @torch.inference_mode()
    def test_rows_do_not_influence_each_other(self, engine: Prepared) -> None:
        check_engine_rows(engine, engine.ready.engine)

    def test_calls_from_several_threads_do_not_mix(self, engine: Prepared) -> None:
        if not isinstance(engine.ready.workload, ModuleWorkload):
            pytest.skip("its model has a state")
        case = engine.case
        cases = [with_tensors(case, [_other(t) for t in tensors_of(case)]) for _ in range(6)]

        def call(case: Case) -> Any:
            with torch.inference_mode():
                return engine.ready.engine(case)

        with ThreadPoolExecutor(3) as pool:
            for case, found in zip(cases, pool.map(call, cases), strict=True):
                check_same(engine.expected(case), found)

    def test_a_child_of_fork_answers(self, engine: Prepared) -> None:
        """Servers load once and fork (gunicorn --preload), and so do DataLoader's workers."""
        case = engine.case
        expected = engine.expected(case)
        with torch.inference_mode():
            engine.ready.engine(case)  # its threads run in this process now

        def call() -> None:
            with torch.inference_mode():
                check_same(expected, engine.ready.engine(case))

        check_in_child(call)


def ways_of(engine: Prepared) -> list[ShippingForm]:
    """The ways of an artifact that the engine itself runs."""
    cls = type(engine.ready.engine)
    own: ShippingForm = "module" if isinstance(engine.ready.workload, ModuleWorkload) else "rebuild"
    return [way for way, runner in cls.ways(own).items() if runner == cls.name]


@quietly
class TestArtifact:
    """An engine's artifact, loaded as a user loads it: checksums compared, self-test run."""

    def test_it_answers_as_before(self, engine: Prepared) -> None:
        for way in ways_of(engine):
            loaded = engine.loaded(way)
            with torch.inference_mode():
                check_same(engine.ready.engine(engine.case), loaded.run(replace(engine.case, fixed=True)))
            assert loaded.notices == []

    def test_what_its_user_calls_answers_as_the_original_does(self, engine: Prepared) -> None:
        for model in _models(engine):
            case = engine.case
            found = model(*case.args, **case.kwargs)
            wanted = engine.expected(case)
            check_same(wanted, found)
            strides = [[tensor.stride() for tensor in _tensors(answer)] for answer in (wanted, found)]
            assert strides[0] == strides[1]
            assert not any(tensor.requires_grad for tensor in _tensors(found))

    @torch.inference_mode()
    def test_rows_do_not_influence_each_other(self, engine: Prepared) -> None:
        for model in _models(engine):
            check_engine_rows(engine, lambda case, model=model: model(*case.args, **case.kwargs))

    @pytest.mark.parametrize("rows", [1, 3, 11])
    def test_another_batch(self, engine: Prepared, rows: int) -> None:
        """It answers rightly, or says in words that it was prepared for other calls."""
        for model in _models(engine):
            case = engine.case
            given = [_with_rows(t, rows) if t.dim() > 1 else t for t in tensors_of(case)]
            case = with_tensors(case, given)
            try:
                found = model(*case.args, **case.kwargs)
            except WorkloadError as refusal:
                _check_words(refusal.reason)
                continue
            check_same(engine.expected(case), found)

    def test_a_copy_answers_alike_and_a_pickle_is_refused(self, engine: Prepared) -> None:
        for model in _models(engine):
            case = engine.case
            check_same(model(*case.args, **case.kwargs), copy.deepcopy(model)(*case.args, **case.kwargs))
            with pytest.raises(TorchwrightError, match="cannot be pickled"):
                pickle.dumps(model)

    def test_damage_is_told(self, engine: Prepared, tmp_path: Path) -> None:
        engine.models.clear()  # their files are written over
        for way in ways_of(engine):
            engine.loaded(way)
            for file in [file for file in engine.shipped[way].rglob("*") if file.suffix != ".json"]:
                if file.is_dir() or file.name == "signature":
                    continue
                whole = file.read_bytes()
                try:
                    file.write_bytes(whole[:-1])
                    with pytest.raises(ArtifactError):
                        engine.loaded(way)
                finally:
                    file.write_bytes(whole)


def check_engine_rows(engine: Prepared, run: Callable[[Case], Any]) -> None:
    case, batched = engine.case, engine.ready.takes.batched
    tensors = tensors_of(case)
    if not batched or len(tensors[batched[0]]) < 2:
        pytest.skip("its calls have no rows beside each other")
    check_rows(
        lambda given: engine.expected(with_tensors(case, given)),
        lambda given: run(with_tensors(case, given)),
        tensors,
        batched,
        ERROR,
    )


def check_same(wanted: Any, found: Any) -> None:
    """The same structure, types and sizes, and nearly the same numbers."""
    assert nested.flatten(wanted)[1] == nested.flatten(found)[1]
    for a, b in zip(nested.leaves(wanted), nested.leaves(found), strict=True):
        if not isinstance(a, torch.Tensor):
            assert (type(a), a) == (type(b), b)
            continue
        assert isinstance(b, torch.Tensor)
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        if a.is_floating_point():
            assert float((a - b).norm()) <= ERROR * float(a.norm())
        else:
            assert torch.equal(a, b)


def _models(engine: Prepared) -> list[Any]:
    """Return the models that a user of the engine's artifacts calls."""
    if not isinstance(engine.ready.workload, ModuleWorkload):
        pytest.skip("what its user calls is not the model")
    if not engine.models:
        engine.models.extend(engine.loaded(way).model for way in ways_of(engine))
    return engine.models


def _skip_where_unavailable(name: str) -> None:
    reason = engines.get(name).unavailable()
    if reason is not None:
        pytest.skip(reason)


def _check_words(reason: str) -> None:
    assert len(reason.split()) > 2


def _tensors(value: Any) -> list[torch.Tensor]:
    return nested.tensors(value)


def _other(tensor: torch.Tensor) -> torch.Tensor:
    """Other values of the same kind, laid out alike."""
    if not tensor.is_floating_point():
        return tensor.flip(-1) if tensor.dim() else tensor
    return torch.empty_like(tensor).copy_(torch.randn(tensor.shape))


def _with_value(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """A copy with this value in its second row."""
    tensor = tensor.clone()
    tensor[1, ::2] = value
    return tensor


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between them, and the outermost dimension innermost in memory."""
    if not tensor.dim():
        return tensor
    wide = tensor.new_empty((*tensor.shape[1:], 2 * tensor.shape[0]))
    return wide[..., ::2].movedim(-1, 0).copy_(tensor)


def _with_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return tensor.repeat(-(-rows // len(tensor)), *[1] * (tensor.dim() - 1))[:rows]
