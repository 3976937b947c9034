"""How an artifact answers other numbers of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import in_process
import torchwright as tw
from small_artifacts import INPUT, made, mlp
from torchwright.artifact import folder as artifact
from torchwright.errors import SlowerCall


def test_no_rows_are_not_asked_of_templates_that_divide_by_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MobileNetV3-small's artifact died of it (SIGFPE) while it was made, and the search ended with the original."""
    monkeypatch.setattr(in_process, "TRIED", (*in_process.TRIED, "max_autotune"))
    path = made(tmp_path, mlp(), ["compile", "max_autotune"])
    _, manifest = artifact.open_artifact(path)
    assert manifest.any_rows is not None
    assert [least for least, _ in manifest.any_rows.sizes.values()] == [1]
    model = tw.load(path).model
    for rows in (1, 3):
        torch.testing.assert_close(model(INPUT[:rows]), mlp()(INPUT[:rows]), rtol=1e-4, atol=1e-5)
    with pytest.warns(SlowerCall):
        assert model(INPUT[:0]).shape == (0, 8)
