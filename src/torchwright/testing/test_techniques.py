"""Contract tests of every registered technique."""

from __future__ import annotations

import copy
import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.engines.dispatch.input_capabilities import with_tensors
from torchwright.optimization.techniques.base import (
    Phase,
    Target,
    Technique,
    describe,
    from_step,
    in_order,
    parse_step,
    techniques,
)
from torchwright.optimization.techniques.properties import PROPERTIES, misspelled
from torchwright.testing.models import MODELS
from torchwright.testing.rows import check_rows
from torchwright.testing.shipped import prepared
from torchwright.workloads.module import ModuleWorkload

NAMES = techniques.names()
ROWS = 4
"""Batch size for the test that rows do not influence each other."""
COMPILER = Step(name="compile")


def make(model: str) -> tuple[Target, Any]:
    """A target for one of the models, and a function that makes fresh inputs."""
    torch.manual_seed(0)
    build, inputs = MODELS[model]
    device = get_device("cpu").identify()
    return make_target(ModuleWorkload(build(), inputs()), device), inputs


def relative_error(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@functools.cache
def forms(name: str, model: str) -> tuple[Technique, ...]:
    """The default of a technique, and each of its other variants on one of the models."""
    technique = techniques.get(name)()
    return tuple(dict.fromkeys((technique, *technique.variants(make(model)[0]))))


@functools.cache
def options(name: str) -> list[Technique]:
    """Every form of a technique that is worth a test: the default, and each variant on each model."""
    found = {name: techniques.get(name)()}
    for model in MODELS:
        found |= {str(v.step()): v for v in forms(name, model)[1:]}
    return list(found.values())


@pytest.mark.parametrize("name", NAMES)
class TestDeclaration:
    def test_is_frozen_dataclass(self, name: str) -> None:
        cls = techniques.get(name)
        assert dataclasses.is_dataclass(cls)
        assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert cls.name == name
        assert isinstance(cls.phase, Phase)

    def test_docstring_is_one_sentence(self, name: str) -> None:
        doc = (techniques.get(name).__doc__ or "").strip()
        assert doc.endswith(".")
        assert "\n" not in doc
        assert len(doc) <= 120

    def test_options_are_documented_with_fitting_defaults(self, name: str) -> None:
        cls = techniques.get(name)
        hints = typing.get_type_hints(cls)
        for row in describe(cls):
            assert row.doc, f"{row.name} has no docstring"
            hint = hints[row.name]
            allowed = typing.get_args(hint)
            if typing.get_origin(hint) is typing.Literal:
                assert row.default in allowed
            else:
                kinds = tuple(typing.get_origin(a) or a for a in allowed if a is not Ellipsis)
                plain = typing.get_origin(hint) in (tuple, list, None)
                assert (
                    isinstance(row.default, typing.get_origin(hint) or hint)
                    if plain
                    else isinstance(row.default, kinds)
                )

    def test_properties_are_words(self, name: str) -> None:
        cls = techniques.get(name)
        for properties in (cls.needs, cls.gives, cls.removes):
            assert isinstance(properties, frozenset)
            assert all(isinstance(word, str) and word.isidentifier() for word in properties)
            assert not properties & set(NAMES) - {name}, "no technique names another"

    def test_properties_are_known(self, name: str) -> None:
        """Needed and removed properties exist in models or are given by a technique; given ones are not misspelt."""
        cls = techniques.get(name)
        given = {word for _, other in techniques for word in other.gives if other is not cls}
        needed = {word for _, other in techniques for word in other.needs if other is not cls}
        own, others = PROPERTIES.keys() | cls.gives, PROPERTIES.keys() | given
        faults = misspelled(cls.needs | cls.removes, own | given, must_exist=True)
        faults += misspelled(cls.gives, others | needed, must_exist=False)
        assert not faults, f"{name}: {'; '.join(faults)}"

    def test_steps_round_trip(self, name: str) -> None:
        for technique in options(name):
            step = technique.step()
            assert from_step(step) == technique
            assert parse_step(str(step)) == step
            assert in_order([step]) == (step,)

    def test_unknown_option_is_refused(self, name: str) -> None:
        with pytest.raises(Exception, match="nonsense"):
            parse_step(f"{name}:nonsense=1")

    def test_environment_is_text(self, name: str) -> None:
        for technique in options(name):
            assert all(isinstance(item, str) for pair in technique.environment().items() for item in pair)

    def test_tolerance_is_a_relative_error(self, name: str) -> None:
        assert 0 < techniques.get(name).tolerance < 1


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
class TestOnModels:
    def test_refusals_are_words(self, name: str, model: str) -> None:
        target, _ = make(model)
        cls = techniques.get(name)
        before = set(target.properties)
        for reason in (cls.available(target.device), *(v.refuse(target) for v in cls().variants(target))):
            assert reason is None or (isinstance(reason, str) and len(reason.split()) > 2)
        assert target.properties == before
        assert target.coverage == []

    def test_apply_keeps_what_the_model_computes(self, name: str, model: str) -> None:
        """Outputs on fresh inputs, in whatever order they lie, against the float64 original; the coverage adds up; the
        original is untouched."""
        cls = techniques.get(name)
        for technique in forms(name, model):
            target, inputs = make(model)
            if not _runs(technique, target):
                continue
            original = copy.deepcopy(target.model)
            target.model = copy.deepcopy(target.model)
            kept = target.model
            target.properties |= {"compiled", "exportable"} & technique.needs
            reason = try_to_apply(target, technique)
            if reason is not None:
                assert reason, "a refusal must say why"
                assert all_equal(original, kept), "a refused technique left its traces"
                continue
            assert technique.removes.isdisjoint(target.properties)
            assert technique.gives <= target.properties
            check_coverage(target, name)
            torch.manual_seed(7)
            fresh = inputs()
            with torch.no_grad():
                expected = copy.deepcopy(original).double()(*(_double(x) for x in fresh))
                outputs = [target.model(*given) for given in (fresh, [_laid_out_otherwise(x) for x in fresh])]
            for output in outputs:
                assert output.shape == expected.shape
                assert output.dtype == torch.float32
                assert relative_error(expected, output) <= cls.tolerance

    def test_rows_do_not_influence_each_other(self, name: str, model: str) -> None:
        """One row 100 times as large, or of NaN: the others stay within the tolerance. No engine runs them here."""
        cls = techniques.get(name)
        for technique in forms(name, model):
            workload, fresh = make_rows(model)
            original = _original(workload)
            target = make_target(workload, get_device("cpu").identify())
            target.properties |= {"compiled", "exportable"} & technique.needs
            unfit = not _runs(technique, target) or try_to_apply(target, technique) is not None
            if unfit or target.settings.engine != "eager":
                continue

            def run(given: Sequence[torch.Tensor], adapted: nn.Module = target.model) -> Any:
                return adapted(*given)

            with torch.no_grad():
                check_rows(original, run, fresh, range(len(fresh)), cls.tolerance)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # in a trial's process nobody sees what libraries say
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_influence_each_other_where_an_engine_runs_them(
    name: str, model: str, tmp_path: Path
) -> None:
    """Like `TestOnModels`, compiled or converted by the engine that the technique asks for or needs."""
    cls = techniques.get(name)
    for i, technique in enumerate(forms(name, model)):
        workload, fresh = make_rows(model)
        steps = in_order([technique.step(), *([COMPILER] if "compiled" in technique.needs else [])])
        (tmp_path / str(i)).mkdir()
        torch.compiler.reset()
        try:
            ready = prepared(workload, steps, None, tmp_path / str(i))
        except RefusedTechnique:
            continue
        if ready.engine.name == "eager":
            continue
        (case,) = workload.cases(ready.target.compute_dtype)

        def run(given: Sequence[torch.Tensor], ready: Any = ready, case: Any = case) -> Any:
            return ready.engine(with_tensors(case, given))

        with torch.inference_mode():
            check_rows(_original(workload), run, fresh, range(len(fresh)), cls.tolerance)


def make_rows(model: str) -> tuple[ModuleWorkload, list[torch.Tensor]]:
    """A workload of ROWS rows of one of the models, and other inputs for it."""
    torch.manual_seed(0)
    build, inputs = MODELS[model]

    def rows() -> list[torch.Tensor]:
        parts = [inputs() for _ in range(ROWS)]
        return [torch.cat(tensors)[:ROWS] for tensors in zip(*parts, strict=True)]

    return ModuleWorkload(build(), tuple(rows())), rows()


def _original(workload: ModuleWorkload) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
    """Return what calls the original model in float64."""
    model = workload.build().double()

    def run(given: Sequence[torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return model(*(_double(x) for x in given))

    return run


def _runs(technique: Technique, target: Target) -> bool:
    """Check whether PyTorch can run the model in the technique's type: recurrent layers need oneDNN's kernels."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in target.model.modules())
    return not (recurrent and technique.half in target.device.without)


def try_to_apply(target: Target, technique: Technique) -> str | None:
    """The reason of a refusal, or None when the technique was applied."""
    try:
        apply_steps(target, [technique.step()])
    except RefusedTechnique as refusal:
        return refusal.found or ""
    return None


def check_coverage(target: Target, name: str) -> None:
    assert target.coverage
    for row in target.coverage:
        assert row.technique == name
        assert 0 < row.changed <= row.total
        assert all(isinstance(reason, str) and reason for reason in row.skipped.values())
        if row.skipped:
            assert row.changed + len(row.skipped) == row.total


def all_equal(a: nn.Module, b: nn.Module) -> bool:
    """Check whether two models have the same modules and tensors."""
    if [(n, type(m)) for n, m in a.named_modules()] != [(n, type(m)) for n, m in b.named_modules()]:
        return False
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) and x.stride() == y.stride() for x, y in pairs)


def _double(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def _laid_out_otherwise(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with the same values and a last dimension that is not contiguous."""
    return x if x.dim() < 2 else x.transpose(-1, -2).contiguous().transpose(-1, -2)
