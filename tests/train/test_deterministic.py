"""`deterministic = true`: processes that share nothing end with the same bits, and what cannot is refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import (
    CONFIG,
    MIXTURE,
    assert_same,
    checkpoints,
    losses,
    make_run,
    run_processes,
    spoil_model,
    state,
)
from torch import nn

from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.loop.train import train
from torchwright.train.run.runtime.checkpoint import CheckpointError

TWO = {"deterministic": True, "threads": 2}


def test_two_runs_are_equal_to_the_bit(tmp_path: Path) -> None:
    """In processes of their own, of two threads each."""
    more = {"model": {"config": CONFIG | MIXTURE}, "precision": "bf16"}
    one, other = (make_run(tmp_path / name, **TWO, **more) for name in ("one", "other"))
    for run in (one, other):
        ((code, told),) = run_processes(run)
        assert code == 0, told
    assert_same(state(checkpoints(one)[-1]), state(checkpoints(other)[-1]))
    assert losses(one) == losses(other)


def test_an_operator_that_cannot_is_named_and_the_mode_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(model: Any) -> None:
        def put(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            output.detach().clone().put_(torch.tensor([0]), torch.ones(1))

        model.norm.register_forward_hook(put)

    spoil_model(monkeypatch, spoil)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(RunError, match=r"no deterministic form.*put_"):
        train(make_run(tmp_path, **TWO), live=False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_the_number_of_threads_is_said_and_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path, deterministic=True)
    run.write_text(run.read_text().replace("threads = 1\n", ""))
    with pytest.raises(RunError, match=r"needs `threads`.*set threads = "):
        train(run, live=False)
    run = make_run(tmp_path, **TWO)
    train(run, live=False)
    run.write_text(run.read_text().replace("threads = 2", "threads = 1"))
    with pytest.raises(CheckpointError, match="threads: 2 → 1"):
        train(run, live=False)
