"""Models in training mode: which modules the mode changes, and who is told."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchwright as tw
from in_process import InProcessRunner, trials_in_process
from torchwright.core.errors import TrainingMode
from torchwright.exporter.verification import verify as verifier
from torchwright.report import html
from torchwright.workloads.training_mode import training_modules, training_notice

X = torch.linspace(-1, 1, 4 * 16).reshape(4, 16)


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


class Noisy(nn.Module):
    """Asks for the mode in a decorated method of its own, not in `forward`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.noised(x)

    @traced
    def noised(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x) if self.training else x


class ByName(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if getattr(self, "training", False) else x


class Frozen(nn.Module):
    """Sets the mode, and computes the same in both."""

    def train(self, mode: bool = True) -> Frozen:
        self.training = False
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 8))


@pytest.mark.parametrize(
    ("module", "changes"),
    [
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.BatchNorm1d(4), True),
        (nn.LSTM(4, 4, 2, dropout=0.1), True),
        (nn.LSTM(4, 4, 2), False),
        (nn.Linear(4, 4), False),
        (nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU()), False),
        (Noisy(), True),
        (ByName(), True),
        (Frozen(), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_modules_that_ask_for_the_mode_are_found(module: nn.Module, changes: bool) -> None:
    assert bool(training_modules(module)) is changes
    assert training_notice(module.eval()) is None


def test_a_model_that_trains_in_part_is_told_the_part() -> None:
    model = net().eval()
    model[2].train()
    notice = training_notice(model)
    assert notice is not None
    assert "2 (Dropout)" in notice
    assert "BatchNorm1d" not in notice


def test_a_forward_of_the_instance_counts() -> None:
    layer: Any = nn.Linear(4, 4)
    layer.forward = lambda x: x * 2 if layer.training else x
    assert training_modules(layer) == ["the model itself (Linear)"]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_a_search_warns_and_its_report_says_so(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    render = html.render
    trials_in_process(monkeypatch, 2.0)
    model = net() if whole else net().eval()
    model[2].train()
    with pytest.warns(TrainingMode, match=r"in training mode.*2 \(Dropout\).*model\.eval\(\)"):
        result = tw.optimize(model, X, techniques=["dtype"], max_drop=0.05, progress=False)
    assert model[2].training
    assert model.training is whole
    assert "in training mode" in str(result)
    assert "in training mode" in render(result.recipe, ())
    assert "in training mode" in json.loads((result.path / "recipe.json").read_text())["notes"][0]


@pytest.mark.slow
def test_a_search_of_a_model_in_eval_mode_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trials_in_process(monkeypatch, 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = tw.optimize(net().eval(), X, techniques=["dtype"], max_drop=0.05, progress=False)
    assert "training mode" not in str(result)


@pytest.mark.slow
def test_an_export_warns_and_writes_the_eval_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "Runner", InProcessRunner)
    model = net()
    with pytest.warns(TrainingMode, match="in training mode"):
        made = tw.export(model, (X,), to="pt2", out=tmp_path / "out")
    assert all(module.training for module in model.modules())
    assert any("in training mode" in note for note in made.export.notes)
    with torch.no_grad():
        torch.testing.assert_close(made.run(X), model.eval()(X), rtol=1e-4, atol=1e-5)
