"""Every registered technique and engine takes and returns instances of a model's own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torchwright.core import nested
from torchwright.core.errors import RefusedTechnique, WorkloadError
from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.artifact.load import load
from torchwright.optimization.engines.apply import make_target
from torchwright.optimization.engines.base import ShippingForm, engines
from torchwright.optimization.techniques.base import Target, techniques
from torchwright.testing.instances import Answer, Sign, build, call
from torchwright.testing.shipped import RunsBy, prepared, ship
from torchwright.testing.test_engines import OWN_MAKERS
from torchwright.testing.test_techniques import try_to_apply
from torchwright.workloads.base import Case
from torchwright.workloads.module import ModuleWorkload

ERROR = 1e-3
"""Tolerance for an engine in float32, which adds in another order."""


def check(wanted: Any, found: Any, tolerance: float) -> None:
    """The same classes all the way down, and nearly the same numbers."""
    assert type(found) is Answer
    assert nested.flatten(wanted)[1] == nested.flatten(found)[1]
    for a, b in zip(nested.leaves(wanted), nested.leaves(found), strict=True):
        if not isinstance(a, torch.Tensor):
            assert (type(a), a) == (type(b), b)
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert float((a - b).norm()) <= tolerance * float(a.norm())
    assert found.output.logits is found.output["logits"]
    assert found.output.states is None


def expected(given: dict[str, Any]) -> Any:
    with torch.no_grad():
        return build()(**given)


def _target() -> Target:
    return make_target(ModuleWorkload(build(), call()), get_device("cpu").identify())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", techniques.names())
def test_a_technique_keeps_the_classes(name: str) -> None:
    cls = techniques.get(name)
    for technique in (cls(), *cls().variants(_target())):
        target = _target()
        target.properties |= {"compiled", "exportable"} & technique.needs
        if try_to_apply(target, technique) is not None:
            continue
        given = call(seed=1)
        with torch.no_grad():
            found = target.model(**given)
        check(expected(given), found, cls.tolerance)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(set(engines.names()) - OWN_MAKERS.keys()))
def test_an_engine_and_its_artifacts_keep_the_classes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := engines.get(name).unavailable():
        pytest.skip(reason)
    techniques.names()
    monkeypatch.setitem(techniques._targets, RunsBy.name, f"{RunsBy.__module__}:RunsBy")
    torch.compiler.reset()
    steps = [Step(name=RunsBy.name, options={"engine": name})]
    (tmp_path / "written").mkdir()
    try:
        ready = prepared(ModuleWorkload(build(), call()), steps, name, tmp_path / "written")
    except RefusedTechnique as refusal:
        pytest.skip(f"{name} refuses this model: {refusal.reason}")
    given = call(seed=1)
    with torch.inference_mode():
        check(expected(given), ready.engine(Case(name="forward", kwargs=given)), ERROR)
    ways: list[ShippingForm] = [way for way, runs in engines.get(name).ways("module").items() if runs == name]
    for way in ways:
        own = build() if way == "module" else None
        model = load(ship(ready, way, tmp_path / way), model=own, trust=True).model
        check(expected(given), model(**given), ERROR)
        for rows in (1, 3):
            fewer = call(rows)
            try:
                found = model(fewer["batch"], pair=fewer["pair"])
            except WorkloadError:  # of a graph at the example's sizes alone
                continue
            check(expected(fewer), found, ERROR)
        other = call()
        other["batch"].sign = Sign.PLUS
        try:
            check(expected(other), model(**other), ERROR)
        except WorkloadError:  # of a graph alone
            assert own is None
