"""AOTInductor's packages: every number of rows that the graph takes, whatever lowering makes of its bounds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from torchwright.exporter.export import export
from torchwright.exporter.targets.aoti import CHECKS, MODEL, Aoti
from torchwright.optimization.engines.compiled import program
from torchwright.optimization.engines.dispatch.call import spec_of
from torchwright.workloads.base import Case


@pytest.mark.slow
def test_an_lstm_takes_one_row(tmp_path: Path) -> None:
    """Its lowering had the package ask for two rows at least."""
    if reason := Aoti.unavailable():
        pytest.skip(reason)

    class Outputs(nn.LSTM):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(x)[0]

    made = export(
        Outputs(8, 16, batch_first=True).eval(), torch.randn(4, 3, 8), to="aoti", out=tmp_path / "out"
    )
    assert made.report["verdict"] == "holds"
    assert [1] in [list(row["sizes"].values()) for row in made.report["calls"] if row["outcome"] == "right"]


@pytest.mark.slow
def test_wrong_sizes_are_refused_and_the_process_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What refuses them was set for good, and then packages of artifacts refused one row."""
    if reason := Aoti.unavailable():
        pytest.skip(reason)
    monkeypatch.delenv(CHECKS, raising=False)
    model = nn.Linear(4, 4).eval()
    (graph,) = program.export(model, [Case(name="call", args=(torch.randn(2, 4),))]).values()
    program.compile_program(graph, tmp_path / MODEL, {})
    for calls in ((2, 3, 2), (3, 2, 3)):  # whichever comes first
        run = Aoti.open(tmp_path, spec_of("call", graph), 1)
        for rows in calls:
            x = torch.randn(rows, 4)
            if rows == 2:
                torch.testing.assert_close(run([x]), [model(x)])
            else:
                with pytest.raises(RuntimeError, match=r"unmatched dim value|API call failed"):
                    run([x])
            assert CHECKS not in os.environ
