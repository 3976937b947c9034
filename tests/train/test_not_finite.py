"""A step that gives no number: the layer in which it began and the rows are named, and nothing has moved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import checkpoints, make_run, run_processes, spoil_model
from torch import nn

from torchwright.train.run.loop.train import TrainingStopped, train


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a run says whose model `break_it` has spoilt."""

    def run(break_it: Any, **changes: Any) -> str:
        spoil_model(monkeypatch, break_it)
        with pytest.raises(TrainingStopped) as caught:
            train(make_run(tmp_path, **changes), live=False)
        return str(caught.value)

    return run


def spoil_output(model: Any) -> None:
    """Row 3 of every micro-batch comes out of a layer as no number."""

    def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.index_fill(0, torch.tensor([3]), math.nan)

    model.layers[1].mlp.down.register_forward_hook(hook)


class Spoilt(torch.autograd.Function):
    """Identity whose gradient is infinite in row 2."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].index_fill(0, torch.tensor([2]), math.inf)


def spoil_gradient(model: Any) -> None:
    model.layers[0].attention.o.register_forward_hook(lambda _module, _inputs, output: Spoilt.apply(output))


def test_the_layer_and_the_row_of_an_output(stopped: Any) -> None:
    told = stopped(spoil_output)
    assert "first in the output of layers.1.mlp.down, in row 3, window 3 (" in told
    assert "its batch: windows 0 to 7 (" in told


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_layer_and_the_row_of_a_gradient(stopped: Any, recompute: str) -> None:
    """The loss is a number; what comes back through the first layer is none."""
    told = stopped(spoil_gradient, recompute=recompute)
    assert "first in the gradient of layers.0.attention.o.weight, in row 2, window 2 (" in told
    assert "loss of nan" not in told


def test_a_weight_that_was_none_from_the_beginning(stopped: Any) -> None:
    def spoil(model: Any) -> None:
        model.layers[1].attention.q.weight.data[5, 7] = math.inf

    assert "first in the weight layers.1.attention.q.weight; its batch" in stopped(spoil)


@pytest.mark.slow
def test_a_row_of_another_process_is_numbered_within_the_batch(tmp_path: Path) -> None:
    """In the fourth step, rows 24 to 31: each of two processes has two micro-batches of two rows."""
    run = make_run(tmp_path, layout={"dp_shard": 2})
    for code, told in run_processes(run, world=2, rank=1, fault="number"):
        assert code == 2, told
        assert "step 4 has a loss of nan" in told
        assert "output of layers.1.mlp.down, in row 5, window 29 (" in told.replace("\n", " ")
    assert [path.name for path in checkpoints(run)] == ["step-00000002"]
