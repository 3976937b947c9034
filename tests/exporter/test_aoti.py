"""AOTInductor's packages: every number of rows that the graph takes, whatever lowering makes of its bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from torchwright.exporter.aoti import Aoti
from torchwright.exporter.export import export


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
