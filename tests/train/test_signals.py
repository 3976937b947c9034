"""Signals of a training run: the block that may be dropped, and the evaluation that a signal breaks off."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import checkpoints, losses, make_run
from torch import nn

from torchwright.train.run.loop import evaluate
from torchwright.train.run.loop.train import train
from torchwright.train.run.objectives.step import let_signals_in
from torchwright.train.run.runtime.signals import Leaving, Signals


def test_a_signal_breaks_off_a_block_that_may_be_dropped() -> None:
    signals = Signals()
    with signals.noted():
        with pytest.raises(Leaving), signals.dropping():
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Leaving), signals.dropping():
            pytest.fail("a block begins although a signal came before")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signals.number == signal.SIGTERM


def test_elsewhere_a_signal_is_only_noted() -> None:
    signals = Signals()
    with signals.noted():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signals.number == signal.SIGINT


def test_python_runs_between_two_layers_of_the_backward_pass() -> None:
    """There alone it handles a signal; frozen layers have no such pass."""
    model: Any = SimpleNamespace(layers=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    let_signals_in(model)
    x = torch.ones(1, 2)
    with torch.no_grad():
        assert not model.layers[0](x)._backward_hooks
    for layer in model.layers:
        x = layer(x)
        assert len(x._backward_hooks or {}) == 1
    x.sum().backward()
    torch.testing.assert_close(model.layers[1].bias.grad, torch.ones(2))


@pytest.mark.parametrize("at", [2, 6])
def test_an_evaluation_is_broken_off_and_the_run_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """In the second step's evaluation, or in the one at the end, after which the model is not written yet."""
    run = make_run(
        tmp_path,
        data={"train": ["a.npy", "b.npy"], "validation": ["held.npy"]},
        evaluation={"every_steps": at if at < 6 else 4},
    )
    measure, counted = evaluate.Evaluator.measure, list[int]()

    def measured(*args: Any) -> Any:
        counted.append(1)
        if len(counted) == (1 if at == 2 else 2):
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(*args)

    monkeypatch.setattr(evaluate.Evaluator, "measure", measured)
    outcome = train(run, live=False)
    assert outcome.signal == signal.SIGTERM
    assert outcome.model is None
    assert outcome.steps == at
    assert int(checkpoints(run)[-1].name[5:]) == at
    outcome = train(run, live=False)
    assert outcome.signal is None
    assert outcome.model is not None
    assert list(losses(run)) == [1, 2, 3, 4, 5, 6]
