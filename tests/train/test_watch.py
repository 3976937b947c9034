"""A run followed from outside: what its file says, while it is written, replaced by a restart, and at its end."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from runs import make_run

from torchwright.cli.failures import exit_code
from torchwright.cli.group import run as command
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.loop.train import TrainingStopped, train
from torchwright.train.run.observe.history import History, Tail, read_history
from torchwright.train.run.observe.metrics import FILE, RunMetrics
from torchwright.train.run.observe.watch import CURVE, DOTS, curve, screen, watch


def shown(folder: Path, history: History, quiet: float = 0.0) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(screen(folder, history, quiet, width=100))
    return console.file.getvalue()  # type: ignore[attr-defined]


def figures(step: int, loss: float) -> dict[str, float]:
    return {"tokens": 256.0 * step, "loss": loss, "tokens_per_s": 512.0}


def test_a_file_is_followed_across_a_restart(tmp_path: Path) -> None:
    """The second attempt goes on after step 2, and step 3 is told anew; half a line is not read yet."""
    with RunMetrics(tmp_path, steps=8, live=False) as metrics:
        metrics.begin(0, steps=8)
        tail = Tail(tmp_path)
        for step in (1, 2, 3):
            metrics.figures(step, figures(step, 4.0 - step))
        assert tail.read()
        assert tail.history.series("loss") == [(1, 3.0), (2, 2.0), (3, 1.0)]
        assert not tail.read()
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 4, "loss": 9')
        file.flush()
        assert not tail.read()
    with RunMetrics(tmp_path, steps=8, live=False) as metrics:
        metrics.begin(2, steps=8)
        metrics.figures(3, figures(3, 0.5))
        metrics.figures(3, {"validation_loss": 0.7}, event="evaluation")
        assert tail.read()
    assert tail.history.series("loss") == [(1, 3.0), (2, 2.0), (3, 0.5)]
    assert tail.history.latest()["validation_loss"] == 0.7
    assert (tail.history.step, tail.history.steps) == (3, 8)
    # 5 steps of 256 tokens at 512 tokens a second.
    assert tail.history.remaining == pytest.approx(2.5)
    told = shown(tmp_path, tail.history, quiet=75)
    assert "step 3 of 8, 2.50 s left; nothing new for 75.0 s" in told
    assert "loss 0.5000" in told


def test_a_run_that_has_ended_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "whole")
    train(run, live=False)
    assert "finished after step 6" in shown(tmp_path, read_history(run.parent / "out"))
    broken = make_run(tmp_path / "broken", optimizer={"lr": 1e12}, clip=False)
    with pytest.raises(TrainingStopped):
        train(broken, live=False)
    history = read_history(broken.parent / "out")
    told = shown(tmp_path, history)
    assert f"stopped after step {history.step}" in told
    assert "has a loss of nan" in " ".join(told.split())
    # A terminal is left when the run is over, and other output gets the state once.
    watch(run.parent / "out", Console(file=io.StringIO(), force_terminal=True, width=80))
    assert exit_code(command, ["train", "--watch", str(run.parent / "out")]) == 0


def test_what_is_in_the_file_is_no_markup_and_no_escape(tmp_path: Path) -> None:
    lines: list[Any] = [
        {"event": "start", "at": 0, "steps": 2},
        {"step": 1, "loss": "[red]no number", "lr": True, "tokens": 1},
        {"step": "one", "loss": 1.0},
        [1, 2],
        {"event": "sample", "at": 1, "text": "[bold]words\x1b[2J"},
        {"event": "stopped", "at": 1, "reason": "[/red]\x1b]0;title\x07"},
    ]
    (tmp_path / FILE).write_text("\n".join(map(json.dumps, lines)) + "\nnot json\n")
    told = shown(tmp_path, read_history(tmp_path))
    assert "\x1b" not in told
    assert "[bold]words" in told
    assert "[/red]" in told


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no figures of a run.*metrics\.jsonl"):
        watch(tmp_path, Console(file=io.StringIO()))


def test_the_curve_of_a_straight_line_is_one() -> None:
    """Every column has one dot, at the height of the figure there, whatever steps have figures."""
    steps = sorted(random.sample(range(1, 500), 40))
    width = random.randint(20, 90)
    rows = [line.plain[10:] for line in curve([(step, 9 - step / 60) for step in steps], width=width)]
    for column in range(2 * width):
        dots = [
            4 * row + dot
            for row, line in enumerate(rows)
            for dot in range(4)
            if (ord(line[column // 2]) - 0x2800) & DOTS[dot][column % 2]
        ]
        assert dots == [pytest.approx((4 * CURVE - 1) * column / (2 * width - 1), abs=0.51)]
    assert curve([(1, 2.0)], width=20) == []
    assert len(curve([(1, 2.0), (9, 2.0)], width=20)) == CURVE
