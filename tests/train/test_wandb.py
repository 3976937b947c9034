"""Figures for Weights & Biases: only where the run asks, offline unless it says otherwise."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import losses, make_run

from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.loop.train import train


class Recorded:
    """A package that notes what it is told."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.codes: list[int] = []
        self.Settings = SimpleNamespace
        self.__spec__ = ModuleSpec("wandb", None)  # by which it is there

    def init(self, **words: Any) -> Recorded:
        self.begun.append(words)
        return self

    def log(self, figures: dict[str, float], *, step: int) -> None:
        self.lines.append((step, figures))

    def finish(self, exit_code: int) -> None:
        self.codes.append(exit_code)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded()
    monkeypatch.setitem(sys.modules, "wandb", recorded)  # type: ignore[arg-type]
    return recorded


def test_figures_go_where_the_run_asks(tmp_path: Path, package: Recorded) -> None:
    run = make_run(tmp_path, wandb={"project": "small"})
    train(run, live=False)
    (begun,) = package.begun
    assert (begun["project"], begun["settings"].mode, begun["group"]) == ("small", "offline", "out")
    assert begun["dir"] == str(run.parent / "out")
    assert {step: line["loss"] for step, line in package.lines if "loss" in line} == losses(run)
    assert package.codes == [0]


def test_nobody_is_told_where_the_run_does_not_ask(tmp_path: Path, package: Recorded) -> None:
    train(make_run(tmp_path), live=False)
    assert not package.begun


def test_a_missing_package_is_named_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"pip install wandb"):
        train(make_run(tmp_path, wandb={"project": "small"}), live=False)
    assert not (tmp_path / "out").exists()
