"""The page of a run: its figures, its time, its data, and nobody's words as markup."""

from __future__ import annotations

import json
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from runs import make_run

from torchwright.cli.group import cli
from torchwright.report.curves import MOST, curve, thinned
from torchwright.train.run import page
from torchwright.train.run.history import read_history
from torchwright.train.run.loop import train
from torchwright.train.run.metrics import FILE, is_run

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J"


class Page(HTMLParser):
    """The tags of a page, and its text by the heading above."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.words: dict[str, list[str]] = {"": []}
        self._inside, self._heading = "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside == "h2" and data.strip():
            self._heading = data.strip()
        self.words.setdefault(self._heading, []).extend(data.split())


def test_a_run_has_a_page(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        tokens=8 * 256,
        data={"mixture": {name: {"files": [f"{name}.npy"], "weight": 1} for name in "ab"}},
    )
    train(run, live=False)
    out = run.parent / "out"
    answer = CliRunner().invoke(cli, ["report", str(out)], standalone_mode=False)
    assert answer.output.strip() == str(out / "report.html"), answer.output
    found = Page((out / "report.html").read_text())
    assert {"Loss", "Learning rate", "Gradient norm", "Tokens per second", "Starts", "Events"} <= set(
        found.words
    )
    assert "0 → 8" in " ".join(found.words["Starts"])
    # Half of 2,048 tokens come from each source, of 3,000 and of 2,000.
    assert found.words["Data"][7:] == ["a", "1", "3,000", "0.34", "times", "b", "1", "2,000", "0.51", "times"]
    loss = read_history(out).latest()["loss"]
    assert f"{loss:.4f}" in found.words[""]


def test_what_is_held_out_has_its_figures_and_curves(tmp_path: Path) -> None:
    """Of a run of any kind: the report of one with an evaluation was once a fault."""
    lines: list[dict[str, Any]] = [
        {"event": "start", "at": 0, "steps": 4, "torch": "2", "world": 1, "run": {}},
        *(
            {"step": step, "samples": 8 * step, "loss": 3.0 / step, "accuracy": step / 8}
            for step in (1, 2, 3)
        ),
        {"event": "evaluation", "at": 2, "validation_loss": 1.23456, "validation_accuracy": 0.25},
        {"event": "evaluation", "at": 3, "validation_loss": 1.12345, "validation_accuracy": 0.625},
    ]
    (tmp_path / FILE).write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = Page(page.render(tmp_path, read_history(tmp_path)))
    tiles = " ".join(found.words[""])
    assert "Validation loss 1.1235" in tiles or "1.1235 Validation loss" in tiles
    assert "62.5%" in tiles
    assert "37.5%" in tiles
    assert {"Loss", "Accuracy"} <= set(found.words)
    assert "validation" in found.words["Accuracy"]


def test_nobodys_words_are_markup(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {
            "event": "start",
            "at": 0,
            "steps": 9,
            "torch": HOSTILE,
            "world": 1,
            "run": {"out": HOSTILE},
            "data": {HOSTILE: {"files": 1, "tokens": 5}},
        },
        {"event": "broken_rows", "file": HOSTILE, "broken": 3, "rows": [[1, HOSTILE], "no pair"]},
        {"step": 1, "loss": 2.0, "lr": float("nan"), HOSTILE: 1.0},
        {"event": "sample", "at": 1, "text": HOSTILE},
        {"event": "qat_receipt", "at": 1, "scheme": HOSTILE},
        {"event": "stopped", "at": 1, "reason": HOSTILE},
    ]
    (tmp_path / FILE).write_text("\n".join(map(json.dumps, lines)) + "\n")
    text = page.render(tmp_path, read_history(tmp_path))
    found = Page(text)
    assert not {"script", "img"} & found.tags
    assert "\x1b" not in text
    assert text.count("&lt;script&gt;alert(1)") == 9
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text


def test_a_folder_of_neither_kind_is_none(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
    (tmp_path / FILE).write_text("")
    assert is_run(tmp_path)
    assert "Step 0" in page.render(tmp_path, read_history(tmp_path))


def test_a_long_line_is_drawn_by_means() -> None:
    points = [(step, random.random()) for step in range(1, random.randint(MOST + 1, 9 * MOST))]
    drawn = thinned(points)
    assert len(drawn) == MOST
    assert drawn[-1][0] == points[-1][0]
    cut = [0, *(step for step, _ in drawn)]
    for begin, (end, mean) in zip(cut, drawn, strict=False):
        part = [value for step, value in points if begin < step <= end]
        assert mean == pytest.approx(sum(part) / len(part))
    assert thinned(points[:9]) == points[:9]
    assert curve("key", "title", {"none": [(1, float("nan"))]}, str) is None
