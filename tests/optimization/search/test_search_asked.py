"""Techniques asked for by name are checked against the model before anything is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchwright as tw
from search_world import fake_world
from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.optimization import optimize as search
from torchwright.optimization.engines.apply import refusal, seen_target
from torchwright.optimization.search.asked import given_by
from torchwright.workloads.module import ModuleWorkload

PICTURE = (torch.randn(1, 3, 16, 16),)


def pictures() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (["cuda_graphs"], "only CUDA devices"),
        (["native"], "the model has no: language"),
        (["compile", "int8_dynamic"], "the model has no: linear"),
        (["packed_convolution"], "the model has no: compiled; ask for compile or regional too"),
        (["compile", "matmul_attention"], "the model has no: half; ask for dtype too"),
    ],
)
def test_a_module_is_looked_at_before_a_trial_is_started(
    asked: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
):
    def start(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a trial was started")

    monkeypatch.setattr(search, "Context", start)
    with pytest.raises(RefusedTechnique, match="was asked for and cannot run here") as found:
        tw.optimize(pictures(), PICTURE, techniques=asked, progress=False)
    assert reason in str(found.value)


def test_the_callers_model_is_only_looked_at():
    model = pictures()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    workload = ModuleWorkload(model, PICTURE)
    target = seen_target(model, workload, get_device("cpu").identify())
    for name in ("dtype", "fold_batchnorm", "openvino", "channels_last", "whole_graph"):
        refusal(target, Step(name=name), frozenset())
    assert target.model is model
    assert target.coverage == []
    torch.testing.assert_close(model.state_dict(), before)


def test_a_step_may_need_what_another_one_gives():
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    target = seen_target(model, ModuleWorkload(model, (torch.randn(2, 64),)), get_device("cpu").identify())
    step = Step(name="int8_dynamic")
    alone, beside = given_by([step], True, frozenset()), given_by([step], False, frozenset())
    without = given_by([step], False, frozenset({"compile", "regional"}))
    assert "the model has no: compiled" in (refusal(target, step, alone) or "")
    assert refusal(target, step, beside) is None
    assert "the model has no: compiled" in (refusal(target, step, without) or "")


def test_another_model_is_checked_when_it_is_built_and_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch,
):
    world = fake_world(monkeypatch)
    world.refused = {"half": "its weights are integers"}
    with pytest.raises(RefusedTechnique, match="its weights are integers"):
        world.search(Step(name="half"), wanted=(Step(name="half"),))
    assert world.alive == []
    assert world.asked == []


def test_what_is_not_asked_for_is_not_checked(monkeypatch: pytest.MonkeyPatch):
    world = fake_world(monkeypatch)
    world.refused = {"half": "its weights are integers"}
    world.search(Step(name="half"))
    assert world.asked == [None]
