"""Every registered technique and engine gives right results for subclasses of torch's layers that compute more."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import make_target
from torchwright.optimization.engines.base import engines
from torchwright.optimization.techniques.base import Target, techniques
from torchwright.testing.shipped import RunsBy, prepared
from torchwright.testing.subclasses import SUBCLASSES, inputs
from torchwright.testing.test_techniques import check_coverage, relative_error, try_to_apply
from torchwright.workloads.base import Case
from torchwright.workloads.module import ModuleWorkload

ERROR = 1e-3
"""Tolerance for an engine in float32: sums in another order."""
QUICK = {"fold_batchnorm", "pointwise_linear", "int8_static", "int8_weight_only", "int4_weight_only", "eager"}
FEW = {"norm with activation", "standardized weight", "padded", "hooks"}
"""Techniques and models of which the plain run has every pair; the sweep has the rest."""


def pairs(names: Iterable[str]) -> list[Any]:
    return [
        pytest.param(name, model, marks=() if name in QUICK and model in FEW else pytest.mark.sweep)
        for name in names
        for model in SUBCLASSES
    ]


def build(model: str) -> nn.Module:
    torch.manual_seed(0)
    return SUBCLASSES[model]().eval()


def expected_of(original: nn.Module, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with torch.no_grad():
        return copy.deepcopy(original).double()(*(x.double() for x in given))


def fresh_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(7)
    return inputs()


@pytest.mark.filterwarnings("ignore")  # of what libraries say of older weight norms
@pytest.mark.parametrize(("name", "model"), pairs(techniques.names()))
def test_a_technique_keeps_what_a_subclass_computes(name: str, model: str) -> None:
    cls = techniques.get(name)
    for technique in (cls(), *cls().variants(_target(model))):
        target = _target(model)
        target.properties |= {"compiled", "exportable"} & technique.needs
        if try_to_apply(target, technique) is not None:
            continue
        check_coverage(target, name)
        given = fresh_inputs()
        with torch.no_grad():
            found = target.model(*given)
        assert relative_error(expected_of(build(model), given), found) <= cls.tolerance, technique.step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "model"), pairs(engines.names()))
def test_an_engine_keeps_what_a_subclass_computes(
    name: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := engines.get(name).unavailable():
        pytest.skip(reason)
    own = techniques.names()  # an engine's own technique prepares the model for it
    monkeypatch.setitem(techniques._targets, RunsBy.name, f"{RunsBy.__module__}:RunsBy")
    step = Step(name=name) if name in own else Step(name=RunsBy.name, options={"engine": name})
    torch.compiler.reset()
    given = fresh_inputs()
    try:
        ready = prepared(ModuleWorkload(build(model), inputs()), [step], name, tmp_path)
    except RefusedTechnique as refusal:
        pytest.skip(f"{name} refuses this model: {refusal.reason}")
    with torch.inference_mode():
        found = ready.engine(Case(name="forward", args=given))
    assert relative_error(expected_of(build(model), given), found) <= ERROR


def _target(model: str) -> Target:
    return make_target(ModuleWorkload(build(model), inputs()), get_device("cpu").identify())
