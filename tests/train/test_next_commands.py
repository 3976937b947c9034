"""Commands to go on with: by what a run has left, ready for a shell."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from torchwright.train.run.observe.history import History
from torchwright.train.run.observe.next_commands import next_commands


def told(end: str | None, **run: Any) -> History:
    history = History()
    history.add({"event": "start", "at": 0, "steps": 2, "run": run})
    if end is not None:
        history.add({"event": end, "at": 2})
    return history


@pytest.mark.parametrize(
    ("run", "left", "first"),
    [
        ({}, "model", "serve {out}"),
        ({"kind": None, "head": None, "lora": None}, "model", "serve {out}"),
        ({"head": None, "lora": {"r": 2}}, "adapter", "serve /models/base --adapter {out}/adapter"),
        ({"kind": "vision-language"}, "adapter", "serve /models/base --adapter mine={out}/adapter"),
        ({"kind": "speech"}, "model", "transcribe --model {out}/model FILE.wav"),
        ({"kind": "image-classification"}, "model", "optimize {out}/model -o {out}/fast"),
    ],
)
def test_what_a_run_has_left_is_used(tmp_path: Path, run: dict[str, Any], left: str, first: str) -> None:
    out = tmp_path / "my run"
    (out / left).mkdir(parents=True)
    if left == "adapter":
        config = {"base_model_name_or_path": "/models/base"}
        (out / left / "adapter_config.json").write_text(json.dumps(config))
    found = next_commands(out, told("end", **run))
    assert shlex.split(found[0].command) == ["torchwright", *(word.format(out=out) for word in first.split())]


def test_a_model_with_a_head_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (found,) = next_commands(tmp_path, told("end", head={"kind": "classification"}))
    assert found.command.startswith("AutoModelForSequenceClassification.from_pretrained(")


@pytest.mark.parametrize("end", [None, "left", "stopped"])
def test_a_run_before_its_end_goes_on(tmp_path: Path, end: str | None) -> None:
    assert next_commands(tmp_path, told(end)) == []
    (tmp_path / "run.toml").write_text("")
    (found,) = next_commands(tmp_path, told(end))
    assert found.command == f"torchwright train {tmp_path}/run.toml"
    (found,) = next_commands(tmp_path, told(None), live=True)
    assert found.command == f"torchwright train --watch {tmp_path}"
