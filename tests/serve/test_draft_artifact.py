"""`torchwright optimize --draft` from end to end: the artifact carries a kept draft, and is served with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from engine_support import drain, request
from test_process import opened

import torchwright as tw
from torchwright.cli import main
from torchwright.optimization.techniques import draft as technique
from torchwright.report.html import render
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.engine.process import ServedDecoder
from torchwright.workloads.language import BUNDLED

pytestmark = pytest.mark.slow
SMALL = ["--prompt-tokens", "16", "--new-tokens", "8", "--time-budget", "30", "--quiet", "--json"]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ignored = shutil.ignore_patterns("speech", "*.txt")
    return Path(shutil.copytree(BUNDLED, tmp_path_factory.mktemp("draft") / "twin", ignore=ignored))


def optimized(
    out: Path, draft: Path, capsys: pytest.CaptureFixture[str], *more: str, code: int = 0
) -> dict[str, Any]:
    words = ["optimize", *SMALL, "--only", "native", "--draft", str(draft), "-o", str(out), *more]
    capsys.readouterr()
    assert main(words) == code
    return json.loads(capsys.readouterr().out)


def of_draft(found: dict[str, Any]) -> dict[str, Any]:
    [row] = [row for row in found["recipe"]["rungs"] if row["step"]["name"] == "draft"]
    return row


def test_a_draft_is_measured_on_the_artifact(
    twin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model as large as the target brings nothing at temperature 0.8, whatever else the machine does meanwhile."""
    out = tmp_path / "artifact"
    row = of_draft(optimized(out, twin, capsys))
    assert row["status"] in ("kept", "dropped", "inconclusive")
    assert "over n-gram look-up alone" in row["reason"]
    assert "at temperature 0.8" in row["reason"]
    assert (out / "draft").is_dir() == row["kept"]
    assert "draft" in (out / "report.html").read_text()


def test_a_draft_that_gains_is_kept_and_serves(
    twin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(words: list[str], seconds: float) -> str:
        assert words[0] == "bench"
        assert tw.load(words[1]).how == "native decoder", "a whole artifact is measured"
        gain = {"over_n_gram": 1.5, "over_n_gram_low": 1.4, "over_n_gram_high": 1.6}
        counts = {"accepted_tokens": 9, "proposed_tokens": 10}
        names = [{"temperature": t, "proposed_by": "draft model and n-gram"} for t in (0.0, 0.8)]
        return json.dumps({"draft": "draft model", "proposals": [name | gain | counts for name in names]})

    monkeypatch.setattr(technique, "_answer", answer)
    out = tmp_path / "artifact"
    found = optimized(out, twin, capsys)
    assert [step["name"] for step in found["recipe"]["steps"]] == ["native", "draft"]
    row = of_draft(found)
    assert (row["kept"], row["speedup"]["low"]) == (True, 1.4)
    assert "over n-gram look-up alone" in render(tw.load(str(out)).recipe, ())
    served = opened(model=str(out), max_running=2)
    assert isinstance(served, ServedDecoder)
    assert isinstance(served.engine, ServingEngine)
    assert served.engine.options.draft == str(out / "draft")
    served.engine.submit(request("a", [5, 6, 7], 6))
    assert len(drain(served.engine)["a", 0].tokens) == 6
    again = optimized(out, twin, capsys, "--resume")
    assert [step["name"] for step in again["recipe"]["steps"]] == ["native", "draft"]


def test_a_draft_that_does_not_fit_is_a_row_and_an_error(
    twin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((twin / "config.json").read_text())
    other = tmp_path / "other"
    shutil.copytree(twin, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[50:52]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert config["architectures"]
    words = ["optimize", *SMALL, "--only", "native", "--draft", str(other), "-o", str(tmp_path / "out")]
    assert main(words) == 1
    assert "has other tokens than" in capsys.readouterr().err
    assert (tmp_path / "out" / "recipe.json").is_file()
