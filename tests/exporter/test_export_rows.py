"""Rows of a batch do not influence each other in any export target and precision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from export_models import Small

from torchwright.exporter.base import GraphTarget, exports
from torchwright.exporter.subject import make_subject
from torchwright.testing.rows import check_rows
from torchwright.workloads.module import ModuleWorkload

QUICK = {("onnx", "int8"), ("openvino", "int8"), ("pt2", "fp32")}


def pairs() -> list[object]:
    found = []
    for name, cls in exports:
        if issubclass(cls, GraphTarget):
            for precision in cls.tolerances:
                marks = () if (name, precision) in QUICK else pytest.mark.sweep
                found.append(pytest.param(name, precision, marks=marks))
    return found


@pytest.mark.filterwarnings("ignore")  # of the converters
@pytest.mark.parametrize(("name", "precision"), pairs())
def test_rows_do_not_influence_each_other(name: str, precision: str, tmp_path: Path) -> None:
    target = exports.get(name)
    if reason := target.unavailable() or target.unwritable():
        pytest.skip(reason)
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(6, 4, 16)
    made = make_subject(ModuleWorkload(model, (x,)), most=8, fixed=target.fixed)
    if target.fixed:
        pytest.skip(target.fixed)
    target.write(made, precision, tmp_path)
    run = target.open(tmp_path, made.graph.spec, 1)

    def original(given: Sequence[torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return model(*given)

    # The report of an export with 8-bit activations says what becomes of NaN (`verification/probes.py`).
    keeps_nan = precision != "int8"
    check_rows(original, run, [torch.randn(6, 4, 16)], [0], target.tolerances[precision], keeps_nan=keeps_nan)
