"""`torchwright profile`: stages, the trace, JSON, what is printed, and what is refused. Trials run in this process."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import torchwright as tw
from in_process import InProcessTrial, measured_cpu, own_cache, trials_in_process
from small_artifacts import INPUT, mlp
from torchwright.cli import main
from torchwright.hardware.devices.base import Ceilings
from torchwright.optimization import profile_stages
from torchwright.optimization.artifact.folder import open_artifact
from torchwright.optimization.profile import recording, values
from torchwright.optimization.profile.terminal import shown

CODE = """
import pathlib
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 8)

    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:
            return y
        return -y

def make():
    pathlib.Path("ran").touch()
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.GELU()), (torch.ones(2, 16),)

def branching():
    return Model(), (torch.ones(2, 16),)

def failing():
    return torch.nn.Linear(16, 8), (torch.ones(2, 3),)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    trials_in_process(monkeypatch, 2.0, cache=tmp_path / "cache")
    monkeypatch.setattr(profile_stages, "TrialProcess", InProcessTrial)
    monkeypatch.setattr(profile_stages, "KERNEL_NAMES", {})
    monkeypatch.setattr(recording, "MOST_CALLS", 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    (tmp_path / "shop.py").write_text(CODE)
    with measured_cpu(Ceilings(read_gb_per_s=10.0, tflops={"float32": 0.1, "bfloat16": 1.0})):
        yield


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    assert (
        main(["optimize", "shop:make", "--quiet", "--max-drop", "0.05", "--without", "compile", "-o", "out"])
        == 0
    )
    (tmp_path / "ran").unlink()
    return tmp_path / "out"


def fields(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def profiled(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["profile", *words, "--quiet", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    found = profiled(capsys, "shop:branching")
    assert found.keys() == fields(values.Profile)
    (stage,) = found["stages"]
    assert stage.keys() == fields(values.ProfiledStage)
    assert (stage["name"], stage["runs_as"], stage["failed"]) == ("original", "eager", None)
    assert stage["recording"].keys() == fields(values.Recording)
    assert stage["recording"]["calls"][0].keys() == fields(values.CallTime)
    assert stage["recording"]["kinds"][0].keys() == fields(values.KindTime)
    operators = {one["name"]: one for one in stage["recording"]["operators"]}
    assert operators["aten::addmm"].keys() == fields(values.OperatorTime)
    assert operators["aten::addmm"]["rate"].keys() == fields(values.Rate)
    (one,) = found["breaks"]["found"]
    assert one.keys() == fields(values.GraphBreak)
    line = 1 + CODE.splitlines().index("        if y.sum() > 0:")
    assert (one["cause"], Path(one["file"]).name, one["line"]) == ("data-dependent branch", "shop.py", line)
    assert (one["rewritten"], one["left"]) == (True, None)


def test_the_page_has_the_tables_and_what_is_rewritten_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiled(capsys, "shop:branching", "--html", "page.html")
    page = (tmp_path / "page.html").read_text()
    for text in ("aten::addmm", "if y.sum() &gt; 0:", "data-dependent branch", "rewrites it"):
        assert text in page
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert sorted(path.name for path in tmp_path.iterdir() if "page" in path.name) == ["page.html"]
    assert main(["profile", "shop:make", "--html", str(tmp_path), "--quiet"]) == 2


def test_the_trace_holds_the_operators_of_every_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = profiled(capsys, "shop:make", "--with", "dtype", "-o", "trace.json")
    assert [stage["name"] for stage in found["stages"]] == ["original", "dtype"]
    assert found["trace"] == "trace.json"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "original", 2: "dtype"}
    for pid in names:
        there = [event for event in events if event["pid"] == pid and event["ph"] == "X"]
        assert min(event["ts"] for event in there) == 0
        assert {"aten::addmm", "aten::gelu", "call forward"} <= {event["name"] for event in there}
    assert sorted(path.name for path in tmp_path.iterdir() if "trace" in path.name) == ["trace.json"]


def test_a_step_that_cannot_run_is_a_stage_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    found = profiled(capsys, "shop:make", "--with", "int8_dynamic")
    first, second = found["stages"]
    assert first["recording"] is not None
    assert second["recording"] is None
    assert "int8_dynamic" in second["failed"]


@pytest.mark.slow
def test_an_artifact_is_profiled_beside_its_original(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = profiled(capsys, str(artifact))
    assert [stage["name"] for stage in found["stages"]] == ["original", "artifact"]
    assert all(stage["recording"] for stage in found["stages"])
    assert found["stages"][1]["runs_as"] == "graphs, uncompiled"
    found = profiled(capsys, str(artifact), "--rungs")
    steps = [str(step) for step in open_artifact(artifact)[0].steps]
    assert "dtype:autocast=true" in steps
    assert [stage["name"] for stage in found["stages"]] == ["original", *steps, "artifact"]


def test_a_strangers_factory_is_not_run(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache(monkeypatch, tmp_path / "another user's")
    found = profiled(capsys, str(artifact))
    original, loaded = found["stages"]
    assert "somebody else made it" in original["failed"]
    assert loaded["recording"] is not None
    assert found["breaks"] is None
    assert not (tmp_path / "ran").exists()
    assert profiled(capsys, str(artifact), "--trust")["stages"][0]["recording"] is not None
    assert (tmp_path / "ran").exists()


@pytest.mark.slow
def test_an_artifact_whose_model_is_nowhere_is_profiled_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tw.optimize(mlp(), INPUT, techniques=["dtype"], max_drop=0.05, progress=False).save(tmp_path / "own")
    original, loaded = profiled(capsys, "own")["stages"]
    assert original["recording"] is None
    assert "its code" in original["failed"] or "no factory" in original["failed"]
    assert {"aten::addmm", "aten::gelu"} <= {one["name"] for one in loaded["recording"]["operators"]}


@pytest.mark.slow
def test_compiled_code_is_told_from_idle_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tw.optimize(mlp(), INPUT, techniques=["compile"], max_drop=0.05, progress=False)
    made.save(tmp_path / "own")
    loaded = profiled(capsys, "own")["stages"][1]
    assert loaded["runs_as"] == "ahead-of-time package"
    kinds = {one["kind"]: one["seconds"] for one in loaded["recording"]["kinds"]}
    assert kinds["compiled code"] > 0
    capsys.readouterr()
    assert main(["profile", "own", "--quiet"]) == 0
    assert "compiled code: kernels without names" in capsys.readouterr().out


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "shop:branching", "--top", "2"]) == 0
    printed = capsys.readouterr()
    for words in (
        "aten::",
        "idle",
        "of machine",
        "more (--top)",
        "data-dependent branch",
        "Cure: ",
        "shop.py:",
    ):
        assert words in printed.out
    assert "if y.sum() > 0:" in printed.out
    assert "looking for graph breaks" in printed.err


def test_names_of_the_users_are_no_markup() -> None:
    found = values.GraphBreak(
        cause="print", file="[red]x[/].py", line=3, text="print(a[/b])", reason="", cure="", count=1,
        whole_function=False, torch_says="",
    )  # fmt: skip
    machine = profile_stages.get_device("cpu").facts()
    breaks = values.Breaks(graphs=2, found=(found,))
    profile = values.Profile(target="[b]", machine=machine, threads=1, torch="2", stages=(), breaks=breaks)
    console = Console(width=100, file=io.StringIO())
    console.print(shown(profile))
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "[red]x[/].py:3" in text
    assert "print(a[/b])" in text


def test_rates_of_a_busy_machine_are_not_shown() -> None:
    busy = "machine busy (load 20 on 2 cores)"
    machine = profile_stages.get_device("cpu").identify()
    profile = values.Profile(
        target="b", machine=machine, threads=1, torch="2", stages=(), breaks=None, disturbed=busy
    )
    console = Console(width=100, file=io.StringIO())
    console.print(shown(profile))
    assert f"at most: not measured: {busy}" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("shop:make -o missing/trace.json", "missing"),
        ("shop:make -o .", "is a folder"),
        ("nowhere", "there is no model at nowhere"),
        ("shop:make --rungs", "--with TECHNIQUE"),
        ("shop:make --with dtyp", "did you mean 'dtype'"),
        ("shop:make --batch 4", "batch is not for shop:make"),
        ("shop:make --set x", "NAME=VALUE"),
        ("shop:make --top 0", "not in the range"),
        ("shop:failing", "the model fails on its own inputs"),
    ],
)
def test_bad_input_is_said_and_nothing_is_written(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--quiet", *words.split()]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert not list(tmp_path.rglob("*trace*"))


@pytest.mark.slow
def test_an_artifact_has_settled_its_steps(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--quiet", str(artifact), "--with", "dtype"]) == 2
    assert "--with dtype is not for" in capsys.readouterr().err
    assert main(["profile", "--quiet", str(artifact), "--batch", "3"]) == 2
    assert "--batch 3 is not for" in capsys.readouterr().err
