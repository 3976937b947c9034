"""Shares as people write them, from Python and from the command line."""

from __future__ import annotations

import math
from typing import Any

import pytest
from click.testing import CliRunner

from torchwright.cli.optimize import command
from torchwright.core.errors import WorkloadError
from torchwright.core.share import share
from torchwright.optimization import api


@pytest.mark.parametrize(
    ("given", "found"),
    [("5%", 0.05), (" 5 % ", 0.05), ("0.05", 0.05), (0.05, 0.05), (0, 0.0), ("0.5%", 0.005), ("150%", 1.5)],
)
def test_a_share_is_read(given: Any, found: float) -> None:
    assert share(given, "max_drop") == pytest.approx(found)


@pytest.mark.parametrize(
    "given", ["", "%", "five", "5%%", "-1%", -0.1, "nan", math.nan, math.inf, None, True, [1]]
)
def test_what_is_not_a_share_is_refused_by_name(given: Any) -> None:
    with pytest.raises(WorkloadError, match=r"max_drop = .* is not a share.*0.05 or 5%"):
        share(given, "max_drop")


def test_the_command_line_and_python_take_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def stop(request: Any, *rest: Any) -> Any:
        given.append(request.budget.max_drop)
        raise WorkloadError("stop")

    monkeypatch.setattr(api, "run_optimize", stop)
    for text in ("5%", "0.05"):
        CliRunner().invoke(command, ["--max-drop", text, "--quiet"])
    import torch

    for value in ("5%", 0.05):
        with pytest.raises(WorkloadError, match="stop"):
            api.optimize(torch.nn.Linear(2, 2), torch.zeros(1, 2), max_drop=value)
    assert given == [0.05] * 4
    assert "is not a share" in CliRunner().invoke(command, ["--max-drop", "some"]).output
