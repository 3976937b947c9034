"""The share of the time of each kind of operator, as the runtime itself counts it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from in_process import InProcessRunner
from small_artifacts import INPUT, mlp
from small_artifacts import made as made_artifact
from torchwright.exporter.base import Written, exports
from torchwright.exporter.export import export
from torchwright.exporter.targets.onnx_file import _by_kind  # pyright: ignore[reportPrivateUsage]
from torchwright.exporter.verification import verify as verifier

LARGEST = {
    "aoti": ("its own code",),
    "onnx": ("Gemm", "MatMul", "FusedMatMul", "FusedGemm"),
    "openvino": ("FullyConnected",),
    "pt2": ("aten::addmm",),
}
"""What a linear layer is in each runtime."""


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages run in this process."""
    monkeypatch.setattr(verifier, "Runner", InProcessRunner)


@pytest.mark.slow
@pytest.mark.parametrize("to", sorted(LARGEST))
def test_what_takes_the_time_is_named(runner: None, to: str, tmp_path: Path) -> None:
    if reason := exports.get(to).unavailable():
        pytest.skip(reason)
    # Of a billion multiplications beside half a million numbers of a softmax there is little doubt, however busy the
    # machine is: an eighth of both took 0.47 and 0.50 of the time once, the softmax waiting for a thread.
    model = nn.Sequential(nn.Linear(2048, 1024), nn.Softmax(-1))
    made = export(model.eval(), torch.randn(512, 2048), to=to, out=tmp_path / "out")
    shares = made.report["time by operator"]
    assert abs(sum(shares.values()) - 1) < 0.01
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert next(iter(shares)) in LARGEST[to], shares


def test_each_operators_first_call_is_not_counted() -> None:
    def event(name: str, kind: str, time: int) -> dict[str, object]:
        return {"cat": "Node", "name": f"{name}_kernel_time", "args": {"op_name": kind}, "dur": time}

    calls = [
        [event("a", "Gemm", 7 * n), event("b", "Gemm", 2 * n), event("c", "Tanh", n)] for n in (100, 1, 2)
    ]
    other = {"cat": "Session", "name": "model_run", "dur": 900}
    assert _by_kind([*(event for call in calls for event in call), other]) == [
        {"Gemm": 9, "Tanh": 1},
        {"Gemm": 18, "Tanh": 2},
    ]


def changed(**methods: Any) -> AbstractContextManager[None]:
    """Register a target `pt2` with other methods."""
    return exports.adding({"pt2": type("Changed", (exports.get("pt2"),), methods)})


def test_a_runtime_that_counts_no_times_tells_none(runner: None, tmp_path: Path) -> None:
    with changed(times=lambda *_: []):
        made = export(nn.Linear(4, 4).eval(), torch.randn(2, 4), to="pt2", out=tmp_path / "out")
    assert "time by operator" not in made.report


def test_what_no_delegate_took_stands_beside_the_rest(runner: None, tmp_path: Path) -> None:
    with changed(convert=_taking({"aten.cumsum": 3e-3, "aten.mean": 1e-3})):
        made = export(nn.Linear(4, 4).eval(), torch.randn(2, 4), to="pt2", out=tmp_path / "out")
    shares = made.report["time by operator"]
    assert set(shares) <= {"aten.cumsum", "aten.mean", "delegates and all else"}
    assert shares["aten.cumsum"] == pytest.approx(3 * shares["aten.mean"], abs=1e-3)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)


def _taking(seconds: dict[str, float]) -> Any:
    real = exports.get("pt2").convert  # pyright: ignore[reportAttributeAccessIssue]

    @classmethod
    def convert(cls: type, *args: Any) -> Written:
        return replace(real(*args), seconds=seconds)

    return convert


@pytest.mark.slow
def test_operators_that_no_delegate_took_are_timed_one_by_one(tmp_path: Path) -> None:
    if reason := exports.get("executorch").unavailable():
        pytest.skip(reason)

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).cumsum(-1).cumsum(0).mean()

    made = export(Sums().eval(), torch.randn(256, 8), to="executorch", out=tmp_path / "out")
    shares = made.report["time by operator"]
    assert shares["aten.cumsum"] > 0.3  # 262,144 sums, without vectors
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)


def test_a_call_that_others_kept_waiting_counts_no_more_than_another(runner: None, tmp_path: Path) -> None:
    calls = [{"a": 3.0, "b": 1.0}, {"a": 3.0, "b": 400.0}, {"a": 3.0, "b": 1.0, "c": 9.0}]
    with changed(times=lambda *_: calls):
        made = export(nn.Linear(4, 4).eval(), torch.randn(2, 4), to="pt2", out=tmp_path / "out")
    assert made.report["time by operator"] == {"a": 0.75, "b": 0.25}


def test_openvinos_means_are_taken_apart() -> None:
    """They hold the first call's preparation: a linear layer of 90 us seemed to take 94% of a call."""
    if reason := exports.get("openvino").unavailable():
        pytest.skip(reason)
    from torchwright.exporter.targets.openvino_ir import _totals  # pyright: ignore[reportPrivateUsage]

    def info(seconds: float, kind: str) -> Any:
        return SimpleNamespace(node_type=kind, real_time=timedelta(seconds=seconds))

    first = _totals([info(7.5, "Linear"), info(0.5, "Linear"), info(9.0, "Result")], 1)
    second = _totals([info(3.8, "Linear"), info(0.3, "Linear"), info(9.0, "Result")], 2)
    assert first == {"Linear": 8.0}
    assert second["Linear"] - first["Linear"] == pytest.approx(0.2)


@pytest.mark.slow
def test_the_artifact_that_it_comes_from_is_timed_beside_it(runner: None, tmp_path: Path) -> None:
    path = made_artifact(tmp_path, mlp(), ["compile"])
    made = export(mlp(), INPUT, to="pt2", out=tmp_path / "out")
    assert "artifact_call_s" not in made.report

    def verified(artifact: Path) -> dict[str, Any]:
        return verifier.verify(made.path, made.export, [], lambda text: None, artifact=artifact, turns=2)

    report = verified(path)
    assert report["verdict"] == "holds"
    assert report["artifact_call_s"] > 0
    assert "x [" in report["speedup_over_artifact"]
    assert "could not be timed" in verified(tmp_path / "nowhere")["artifact"]
