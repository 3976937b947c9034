"""The share of the time of each kind of operator, as the runtime itself counts it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from export_faults import InProcess
from torch import nn

from torchwright.exporter import verify as verifier
from torchwright.exporter.base import exports
from torchwright.exporter.export import export
from torchwright.exporter.onnx_file import _by_kind  # pyright: ignore[reportPrivateUsage]

LARGEST = {
    "onnx": ("Gemm", "MatMul", "FusedMatMul", "FusedGemm"),
    "openvino": ("FullyConnected",),
    "pt2": ("aten::addmm",),
}
"""What a linear layer is in each runtime."""


@pytest.mark.parametrize("to", sorted(LARGEST))
def test_what_takes_the_time_is_named(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := exports.get(to).unavailable():
        pytest.skip(reason)
    monkeypatch.setattr(verifier, "Runner", InProcess)
    # Of 134 million multiplications beside 65,536 numbers of a softmax there is no doubt, however busy the machine is.
    model = nn.Sequential(nn.Linear(2048, 1024), nn.Softmax(-1))
    made = export(model.eval(), torch.randn(64, 2048), to=to, out=tmp_path / "out")
    shares = made.report["time by operator"]
    assert abs(sum(shares.values()) - 1) < 0.01
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert next(iter(shares)) in LARGEST[to], shares


def test_each_operators_first_call_is_not_counted() -> None:
    def event(name: str, kind: str, time: int) -> dict[str, object]:
        return {"cat": "Node", "name": f"{name}_kernel_time", "args": {"op_name": kind}, "dur": time}

    events = [event("a", "Gemm", 100), event("b", "Gemm", 50), event("a", "Gemm", 7), event("b", "Gemm", 2)]
    other = {"cat": "Session", "name": "model_run", "dur": 900}
    assert _by_kind([*events, event("c", "Tanh", 1), event("c", "Tanh", 4), other]) == {"Gemm": 9, "Tanh": 4}


def test_a_runtime_that_counts_no_times_tells_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "Runner", InProcess)
    monkeypatch.setattr(exports.get("pt2"), "times", lambda *_: {})
    made = export(nn.Linear(4, 4).eval(), torch.randn(2, 4), to="pt2", out=tmp_path / "out")
    assert "time by operator" not in made.report
