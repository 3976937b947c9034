"""A workload of another package, through its entry point alone: from the search to what its user calls."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import outside_workload
from in_process import trials_in_process
from torchwright.cli import main
from torchwright.core import registry
from torchwright.core.errors import ArtifactError, WorkloadError
from torchwright.optimization import api
from torchwright.optimization.open_model import open_model
from torchwright.workloads.base import workloads

SOUND = torch.randn(150, generator=torch.Generator().manual_seed(7))
Install = Callable[[str], Path]
USER = """
import json, sys
import torch
import torchwright as tw
from torchwright.optimization import api

loaded = tw.load(sys.argv[1])
sound = torch.randn(150, generator=torch.Generator().manual_seed(7))
print(json.dumps({
    "model": type(loaded.model).__name__,
    "text": loaded.model.transcribe(sound),
    "bench": api.bench(sys.argv[1]),
}))
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a class of `outside_workload` for this process and those that it starts; returns the model's folder."""

    def install(name: str) -> Path:
        site = tmp_path / "site"
        about = site / "outside-1.0.dist-info"
        about.mkdir(parents=True)
        shutil.copy2(outside_workload.__file__, site / "outside_package.py")
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(
            f"[torchwright.workloads]\nletters = outside_package:{name}\n"
        )
        monkeypatch.syspath_prepend(str(site))
        path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
        monkeypatch.setenv("PYTHONPATH", path)
        monkeypatch.delitem(sys.modules, "outside_package", raising=False)
        registry._installed.cache_clear()  # a process looks once
        added.enter_context(workloads.adding({"letters": f"outside_package:{name}"}))
        return outside_workload.save(tmp_path / "model")

    with contextlib.ExitStack() as added:
        yield install
    registry._installed.cache_clear()


def search(folder: Path, out: Path, **options: Any) -> Any:
    given: dict[str, Any] = {
        "max_drop": 0.05,
        "objective": "latency",
        "time_budget": 300.0,
        "seed": 0,
        "device": "cpu",
        **dict.fromkeys(("batch", "prompt_tokens", "new_tokens", "tokens", "eval_text")),
        "with_steps": ["dtype"],
        "without": ["compile", "int8_dynamic", "threads"],
        "on_event": lambda event: None,
        "command": "torchwright optimize",
    }
    return api.optimize_cli(str(folder), out=str(out), **(given | options))


@pytest.mark.slow
def test_from_the_search_to_what_its_user_calls(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, out = install("Speech"), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        trials_in_process(patch, 2.0)
        result = search(folder, out, batch=3, settings=["samples=176"])
        assert [step.name for step in result.recipe.steps] == ["dtype"]
        assert result.recipe.workload == {
            "kind": "letters",
            "model": str(folder),
            "batch": 3,
            "samples": 176,
        }
        assert api.verify(out)["verdict"] == "holds"
    shutil.rmtree(folder)  # the artifact has its own copy

    words = [sys.executable, "-c", USER, str(out)]
    told = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    assert told["model"] == "Transcriber"
    assert set(told["text"]) <= set(outside_workload.ALPHABET)
    assert told["text"] == result.model.transcribe(SOUND) != ""
    assert told["bench"]["sound_s_per_s"] == pytest.approx(3 * 176 / 8000 / told["bench"]["listen_s"])
    assert told["bench"]["promised"] == str(result.speedup)


def test_it_is_listed_with_its_options(install: Install, capsys: pytest.CaptureFixture[str]):
    install("Speech")
    assert main(["workloads", "--json"]) == 0
    (row,) = [row for row in json.loads(capsys.readouterr().out) if row["name"] == "letters"]
    assert [option["name"] for option in row["options"]] == ["folder", "batch", "samples"]


@pytest.mark.slow
def test_generate_says_what_it_is_instead(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, out = install("Speech"), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        trials_in_process(patch, 2.0)
        search(folder, out)
    with pytest.raises(ArtifactError, match="holds no language model") as caught:
        open_model(str(out))
    assert caught.value.found == "the workload 'letters'"


@pytest.mark.slow
def test_an_artifact_without_its_package_says_what_is_missing(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, out = install("Speech"), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        trials_in_process(patch, 2.0)
        search(folder, out)
    monkeypatch.delitem(workloads._targets, "letters")
    with pytest.raises(ArtifactError, match=r"is of kind 'letters'.*install the package that has it"):
        api.verify(out)


def test_a_description_that_nothing_can_be_made_of_is_refused_before_the_search(
    install: Install, tmp_path: Path
):
    with pytest.raises(WorkloadError, match=r"Forgetful\.describe\(\).*model is None"):
        search(install("Forgetful"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("tokens=8", "the option tokens is not for .*Allowed: batch, samples"),
        ("samples", "--set samples.*NAME=VALUE"),
        ("=8", "--set =8"),
    ],
)
def test_options_that_it_does_not_have(install: Install, tmp_path: Path, setting: str, words: str):
    with pytest.raises(WorkloadError, match=words):
        search(install("Speech"), tmp_path / "out", settings=[setting])


def test_a_metric_that_fails_is_said_to_be_the_workloads(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trials_in_process(monkeypatch)
    with pytest.raises(WorkloadError, match=r"the workload 'letters' failed in Unfair\.compare") as caught:
        search(install("Unfair"), tmp_path / "out")
    assert "TypeError" in str(caught.value.found)
    assert "outside_package.py, line " in str(caught.value.found)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Broken", r"the workload 'letters' failed in Broken\.__init__.*KeyError: 'alphabet'"),
        ("Unnamed", r"'letters' is registered as outside_package:Unnamed, and that class has another name"),
    ],
)
def test_what_its_author_can_mend_is_no_fault_of_ours(
    install: Install, name: str, words: str, capsys: pytest.CaptureFixture[str]
):
    folder = install(name)
    assert main(["optimize", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "fault in Torchwright" not in said
    assert re.search(words, said)
