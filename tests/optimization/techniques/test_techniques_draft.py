"""A draft as a technique: what is asked of `torchwright bench`, and what is made of its answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchwright.core.errors import ModelError, RefusedTechnique, TechniqueFailed, WorkloadError
from torchwright.core.records import Step
from torchwright.optimization import api
from torchwright.optimization.techniques import draft as module
from torchwright.optimization.techniques.base import from_step
from torchwright.workloads.language import BUNDLED


def row(temperature: float, name: str, over: float) -> dict[str, Any]:
    ends = {"over_n_gram_low": over - 0.1, "over_n_gram_high": over + 0.1}
    counts = {"proposed_tokens": 50, "accepted_tokens": 20}
    return {"temperature": temperature, "proposed_by": name, "over_n_gram": over} | ends | counts


def test_the_served_artifact_is_compared_with_look_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[list[str]] = []

    def answer(words: list[str], seconds: float) -> str:
        asked.append(words)
        rows = [row(t, name, 1.0 + t) for t in (0.0, 0.8) for name in ("EAGLE-3", "EAGLE-3 and n-gram")]
        return json.dumps({"draft": "EAGLE-3", "proposals": rows})

    monkeypatch.setattr(module, "_answer", answer)
    technique = from_step(Step(name="draft", options={"folder": str(BUNDLED)}))
    workload = {"batch": 2, "prompt_tokens": 16, "new_tokens": 8, "eval_text": None, "model": "x"}
    found = technique.try_on(tmp_path, workload, 60.0)
    assert {where: gain.value for where, gain in found.gains.items()} == {
        "at temperature 0": 1.0,
        "at temperature 0.8": 1.8,
    }
    assert found.note == "40 of 100 proposals accepted"
    words = ["bench", str(tmp_path), "--draft", str(BUNDLED), "--json"]
    assert asked == [[*words, "--batch", "2", "--prompt-tokens", "16", "--new-tokens", "8"]]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= technique.files().keys()


def test_without_a_folder_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedTechnique, match="no draft is named"):
        from_step(Step(name="draft")).try_on(tmp_path, {}, 1.0)


def test_a_draft_that_is_not_there_is_refused_before_the_search() -> None:
    assert [step.name for step in api.asked_for(["native"], str(BUNDLED))] == ["native", "draft"]
    with pytest.raises(ModelError, match="no/such"):
        api.asked_for([], "./no/such/folder")
    with pytest.raises(WorkloadError, match="does not carry the model's MTP layer"):
        api.asked_for([], "mtp")


@pytest.mark.slow
def test_what_the_command_says_is_the_reason(tmp_path: Path) -> None:
    """In a process of its own, which may also take too long."""
    technique = from_step(Step(name="draft", options={"folder": str(BUNDLED)}))
    with pytest.raises(TechniqueFailed, match=r"there is no model at|no/such"):
        technique.try_on(Path("./no/such/artifact"), {}, 120.0)
    with pytest.raises(TechniqueFailed, match="nothing after 0 s"):
        technique.try_on(Path("./no/such/artifact"), {}, 0.0)
