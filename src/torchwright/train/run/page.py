"""`torchwright report OUT` of a training run: one self-contained page, no script, every word escaped (no torch)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from markupsafe import Markup

from torchwright.ledger import Account, LedgerError, read_account, show
from torchwright.ledger.buckets import BUCKETS, NANO
from torchwright.process.files import replacing
from torchwright.report import wording
from torchwright.report.curves import curve
from torchwright.report.html import environment
from torchwright.train.run.history import COUNTED, History, read_history
from torchwright.train.run.metrics import HELD_OUT, UNITS

PAGE = "report.html"
LISTED = 20
"""Samples, and broken rows of a file, at most."""
QUALITY = ("accuracy", "recall_at_1", "word_error_rate", "reward_accuracy", "auc", "normalized_entropy")
"""What a run is judged by beside its loss, where its kind has it."""
TOLD = ("profile", "stopped", "left", "end", "qat_receipt")
"""Events with a line of their own."""


def write(folder: Path) -> Path:
    """Write OUT/report.html of what the run has told so far; raises `RunError` where there is no run."""
    page = folder / PAGE
    text = render(folder, read_history(folder))
    with replacing(page) as beside:
        beside.write_text(text, encoding="utf-8")
    return page


def render(folder: Path, history: History) -> str:
    start = history.of("start")[-1] if history.of("start") else {}
    run = start.get("run") if isinstance(start.get("run"), dict) else None
    of_all = f" of {history.steps:,}" if history.steps else ""
    stopped = [event for event in [history.end] if event and event["event"] == "stopped"]
    return (
        environment()
        .get_template("run.html.j2")
        .render(
            name=folder.resolve().name,
            headline=f"Step {history.step:,}{of_all}; torch {start.get('torch')}, {start.get('world')} processes",
            stopped=str(stopped[0].get("reason")) if stopped else None,
            tiles=list(_tiles(history)),
            plates=list(_plates(history)),
            account=_account(folder),
            sources=list(_sources(history, start, run)),
            skipped=[
                (event.get("file"), event.get("broken"), _pairs(event.get("rows"))[:LISTED])
                for event in _latest(history.of("broken_rows"), "file")
            ],
            samples=[(event.get("at"), event.get("text")) for event in history.of("sample")[-LISTED:]],
            events=[(event.get("at"), _told(event)) for event in history.events if event["event"] in TOLD],
            run=json.dumps(run, indent=1) if run else None,
        )
    )


def _tiles(history: History) -> Iterator[tuple[str, str]]:
    latest = history.latest()
    for figure in ("loss", *QUALITY):
        for name in (figure, HELD_OUT + figure):
            if name in latest:
                yield _title(name), f"{latest[name]:{UNITS[figure]}}"
    for unit in COUNTED:
        if unit in latest:
            yield unit.capitalize(), f"{latest[unit]:,.0f}"
        if f"{unit}_per_s" in latest:
            yield f"{unit.capitalize()} per second", f"{latest[f'{unit}_per_s']:,.0f}"
    if "memory_bytes" in latest:
        yield "Peak memory", wording.size(latest["memory_bytes"])


def _plates(history: History) -> Iterator[tuple[str, Markup]]:
    figures: list[tuple[str, str, dict[str, list[tuple[int, float]]], Callable[[float], str]]] = [
        ("loss", "Loss", _both(history, "loss"), lambda value: f"{value:.3g}"),
        *((name, _title(name), _both(history, name), _in(UNITS[name])) for name in QUALITY),
        ("lr", "Learning rate", {"lr": history.series("lr")}, lambda value: f"{value:.1e}"),
        ("norm", "Gradient norm", {"norm": history.series("grad_norm")}, lambda value: f"{value:.3g}"),
        ("experts", "Fullest expert over the mean", _loads(history), lambda value: f"{value:.3g}"),
    ]
    for unit in COUNTED:
        speed = {unit: history.series(f"{unit}_per_s")}
        figures.append((unit, f"{unit.capitalize()} per second", speed, lambda value: f"{value:,.0f}"))
    for key, title, lines, words in figures:
        figure = curve(key, title, lines, words)
        if figure is not None:
            yield title, figure


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _in(unit: str) -> Callable[[float], str]:
    return lambda value: format(value, unit)


def _both(history: History, name: str) -> dict[str, list[tuple[int, float]]]:
    return {"training": history.series(name), "validation": history.series(HELD_OUT + name)}


def _loads(history: History) -> dict[str, list[tuple[int, float]]]:
    """How full experts were, in the layer where they were least even and as a mean of layers."""
    of_layers = {
        step: [load for name, load in figures.items() if name.startswith("expert_load/")]
        for step, figures in sorted(history.figures.items())
    }
    means = [(step, sum(loads) / len(loads)) for step, loads in of_layers.items() if loads]
    return {"worst layer": history.series("expert_load"), "mean of layers": means}


def _account(folder: Path) -> dict[str, Any] | None:
    """The ledger's figures as words; None where the run folder has no ledger."""
    try:
        account: Account = read_account(folder)
    except LedgerError:
        return None
    return {
        "headline": show.headline(account),
        "buckets": [
            (name.replace("_", " "), show.duration(seconds), seconds / account.wall, BUCKETS[name])
            for name, seconds in account.seconds().items()
            if seconds
        ],
        "attempts": [
            (
                attempt.number,
                show.clock(attempt.start),
                show.duration((attempt.end - attempt.start) / NANO),
                attempt.world,
                show.steps_of(attempt),
                show.how_ended(attempt, last=attempt is account.attempts[-1]),
            )
            for attempt in account.attempts
        ],
    }


def _sources(
    history: History, start: dict[str, Any], run: dict[str, Any] | None
) -> Iterator[tuple[str, int, str, str]]:
    """(source, files, tokens or rows in them, how often it was read) as the last start found them."""
    sources = start.get("data")
    if not isinstance(sources, dict):
        return
    mixture = (run or {}).get("data", {}).get("mixture") or {}
    weights = {name: float(mixture[name]["weight"]) if name in mixture else 1.0 for name in sources}
    seen = next((history.latest()[unit] for unit in COUNTED if unit in history.latest()), 0.0)
    for name, facts in sources.items():
        share, held = weights[name] / sum(weights.values()), facts.get("tokens", facts.get("samples", 0))
        read = f"{share * seen / held:.2f} times" if held else wording.MISSING
        yield name, facts["files"], f"{held:,}", read


def _latest(events: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The last event of each value of `key`: every start tells of the same files again."""
    return list({str(event.get(key)): event for event in events}.values())


def _pairs(rows: Any) -> list[tuple[Any, Any]]:
    return (
        [(row[0], row[1]) for row in rows if isinstance(row, list) and len(row) == 2]
        if isinstance(rows, list)
        else []
    )


def _told(event: dict[str, Any]) -> str:
    """An event in one line."""
    facts = {name: value for name, value in event.items() if name not in ("event", "at")}
    plain = {name: value for name, value in facts.items() if not isinstance(value, list | dict)}
    words = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in plain.items())
    return f"{event['event'].replace('_', ' ')}{': ' if words else ''}{words}"
