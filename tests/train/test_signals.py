"""Signals of a training run: the block that may be dropped, and the evaluation that a signal breaks off."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import before_checkpoints, checkpoints, losses, make_run
from safetensors.torch import load_file
from torch import nn

from torchwright.core.paths import file_digest
from torchwright.train.run.loop import evaluate
from torchwright.train.run.loop.train import train
from torchwright.train.run.objectives.step import let_signals_in
from torchwright.train.run.runtime.checkpoint import (
    Checkpoints,
    Described,
    DigestWriter,
    describe,
    load,
    whole,
)
from torchwright.train.run.runtime.processes import processes
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


@pytest.mark.plain("2")
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


def at(step: int) -> tuple[dict[str, torch.Tensor], Described]:
    """A state that can be told apart by its step."""
    tensors = {
        "model.weight": torch.full((3, 5), float(step)),
        "model.half": torch.full((7,), float(step), dtype=torch.bfloat16),
        "model.none": torch.empty(0, 4),
        "optimizer.step": torch.tensor(float(step)),
        "optimizer.moments": torch.full((5,), step, dtype=torch.uint8),
    }
    return tensors, Described(step=step, tokens=step, run={}, facts={})


def test_a_checkpoint_is_a_safetensors_file_with_its_digest(tmp_path: Path) -> None:
    with processes(60):
        made = Checkpoints(tmp_path, 2, lambda step: None)
        for last in (False, True):
            tensors, described = at(4 + last)
            made.save(tensors, described, last=last)
            made.wait()
            folder = whole(made.folder)[-1]
            ((name, digest),) = describe(folder).files.items()
            assert digest == file_digest(folder / name)
            read = load_file(folder / name)
            assert read.keys() == tensors.keys()
            assert all(read[key].dtype == tensors[key].dtype for key in tensors)
            assert all(read[key].equal(tensors[key]) for key in tensors)
            resizable = [tensor.untyped_storage().resizable() for tensor in tensors.values()]
            assert all(resizable), "FSDP frees parameters by resizing their storage"
            filled, _ = at(0)
            load(folder, filled)
            assert all(filled[key].equal(tensors[key]) for key in tensors)


@pytest.mark.parametrize("best", [None, 2])
def test_who_leaves_writes_the_last_state_and_no_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: int | None
) -> None:
    """Both took 5.5 s of a busy machine; the checkpoint with the best loss is kept all the same."""

    def wait(writer: DigestWriter) -> None:
        if writer.described.step == 2:
            assert writer.abandoned.wait(0.2 if best else 30) == (best is None)

    before_checkpoints(monkeypatch, wait)
    with processes(60):
        made = Checkpoints(tmp_path, 9, lambda step: None)
        made.save(*at(1))
        made.save(*at(2))
        made.best = best
        made.save(*at(3), last=True, leaving=True)
        made.wait()
        names = [path.name for path in sorted(made.folder.iterdir())]
        assert names == [f"step-0000000{step}" for step in ((1, 2, 3) if best else (1, 3))]
        filled, _ = at(0)
        load(made.folder / names[-1], filled)
        assert filled["model.weight"].equal(at(3)[0]["model.weight"])


def test_who_leaves_at_the_step_that_is_being_written_writes_it_to_its_end(tmp_path: Path) -> None:
    with processes(60):
        made = Checkpoints(tmp_path, 9, lambda step: None)
        made.save(*at(1))
        made.save(*at(1), last=True, leaving=True)
        made.wait()
        assert [path.name for path in made.folder.iterdir()] == ["step-00000001"]
