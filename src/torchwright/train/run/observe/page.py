"""The page of a training run: one self-contained HTML file, no script, every word escaped (no torch)."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torchwright.core.errors import TorchwrightError
from torchwright.core.process.files import replacing
from torchwright.report import wording
from torchwright.report.html import environment
from torchwright.train.ledger import Account, LedgerError, read_account, show
from torchwright.train.ledger.buckets import BUCKETS, NANO
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.observe.history import COUNTED, History, Tail, read_history
from torchwright.train.run.observe.metrics import FILE, HELD_OUT, UNITS
from torchwright.train.run.observe.next_commands import next_commands
from torchwright.train.run.observe.page_charts import QUALITY, charts, title

PAGE = "report.html"
LISTED = 20
"""Samples, and broken rows of a file, at most."""
TOLD = ("profile", "stopped", "left", "end", "qat_receipt", "threads", "memorizes")
"""Events with a line of their own."""
STATES = {"end": "finished", "left": "left as asked", "stopped": "stopped"}
"""Event of an attempt's end → its name."""
RELOAD = 10
"""Seconds after which a browser loads the page of a run that is at work again."""
SHARE = 0.02
"""Share of a run's time that may go into its page."""


class LivePage:
    """The page of a run that is at work, written by the run itself."""

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Write nothing with `folder=None`: one process of a run writes the page."""
        self._folder, self._clock = folder, clock
        self._tail: Tail | None = None
        self._due = clock() + RELOAD

    def refresh(self) -> None:
        """Write the page if it is due: every `RELOAD` seconds, less often where that would cost over `SHARE`."""
        began = self._clock()
        if self._folder is None or began < self._due:
            return
        self._tail = self._tail or Tail(self._folder)
        self._tail.read()
        with contextlib.suppress(
            OSError
        ):  # a full disk is reported by the checkpoint; the page is a by-product
            _write(self._folder, render(self._folder, self._tail.history, live=True))
        ended = self._clock()
        self._due = ended + max(RELOAD, (ended - began) / SHARE)


def write(folder: Path, *, live: bool = False) -> Path:
    """Write OUT/report.html of what the run has reported so far.

    Raises `RunError` if the folder holds no run, or figures that no run writes.
    """
    history = read_history(folder)
    try:
        text = render(folder, history, live=live and history.end is None)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunError(
            f"the figures in {folder / FILE} are damaged", found=f"{type(error).__name__}: {error}"
        ) from error
    return _write(folder, text)


def write_last(folder: Path) -> None:
    """Write the page of a run that has ended, however it ended; the page must not hide how."""
    with contextlib.suppress(OSError, TorchwrightError):
        write(folder)


def _write(folder: Path, text: str) -> Path:
    page = folder / PAGE
    with replacing(page) as beside:
        beside.write_text(text, encoding="utf-8")
    return page


def render(folder: Path, history: History, *, live: bool = False) -> str:
    """Return the page; one of a run that is at work (`live`) is loaded again by itself."""
    end = history.end
    return (
        environment()
        .get_template("run.html.j2")
        .render(
            name=folder.resolve().name,
            state="running" if live else STATES[end["event"]] if end else "interrupted",
            headline=_headline(history, live=live),
            progress=history.step / history.steps if live and history.steps else None,
            reload=RELOAD if live else None,
            clock=show.clock(time.time_ns()),
            warnings=list(_warnings(history)),
            following=next_commands(folder, history, live=live),
            tiles=list(_tiles(history)),
            charts=list(charts(history)),
            proposals=_proposals(history),
            served=_served(history),
            account=_account(folder),
            sources=list(_sources(history)),
            notes=[
                (event.get("file"), event.get("note"), event.get("documents"))
                for event in _latest(history.of("labels"), "file", "note")
            ],
            skipped=[
                (event.get("file"), event.get("broken"), _pairs(event.get("rows"))[:LISTED])
                for event in _latest(history.of("broken_rows"), "file")
            ],
            samples=_samples(history),
            prompts="prompts" in (history.run.get("evaluation") or {}),
            events=[(event.get("at"), _message(event)) for event in history.events if event["event"] in TOLD],
            run=json.dumps(history.run, indent=1) if history.run else None,
        )
    )


def _headline(history: History, *, live: bool) -> str:
    """Return progress and the versions that the run was made by, in one line."""
    words = [f"Step {history.step:,}" + (f" of {history.steps:,}" if history.steps else "")]
    if read := history.series("epoch"):
        last, number = read[-1]
        of_all = f" of {number / last * history.steps:.2f}" if history.steps and last else ""
        words.append(f"epoch {number:.2f}{of_all}")
    if live and history.remaining is not None:
        words.append(f"about {show.duration(history.remaining)} left")
    world = history.start.get("world")
    words += [f"torch {history.start.get('torch')}", f"{world} process{'es' if world != 1 else ''}"]
    return ", ".join(words)


def _warnings(history: History) -> Iterator[str]:
    """Yield why the run stopped, and that it began to memorize."""
    end = history.end
    if end and end["event"] == "stopped":
        yield str(end.get("reason"))
    for event in history.of("memorizes")[-1:]:
        yield (
            f"From step {event.get('best')} to step {event.get('at')} the validation loss rose while the training loss "
            "fell: the model began to memorize. The checkpoint with the best validation loss is kept."
        )


def _tiles(history: History) -> Iterator[tuple[str, str, str]]:
    """Yield (title, value, remark) of the last figures."""
    latest = history.latest()
    for figure in ("loss", *QUALITY):
        for name in (figure, HELD_OUT + figure):
            if name in latest:
                yield title(name), f"{latest[name]:{UNITS[figure]}}", _best(history, name)
    for unit in COUNTED:
        if unit in latest:
            yield unit.capitalize(), f"{latest[unit]:,.0f}", ""
        if f"{unit}_per_s" in latest:
            yield f"{unit.capitalize()} per second", f"{latest[f'{unit}_per_s']:,.0f}", ""
    if "memory_bytes" in latest:
        yield "Peak memory", wording.size(latest["memory_bytes"]), ""


def _proposals(history: History) -> list[tuple[Any, ...]]:
    """Return a draft head's acceptance by the position of a proposal: (position, agree, overlap, chain)."""
    return [
        (one["position"], *(f"{one[name]:.1%}" for name in ("agree", "overlap", "chain")))
        for event in history.of("acceptance")[-1:]
        for one in event["positions"]
    ]


def _served(history: History) -> list[tuple[str, ...]]:
    """Return the served gain of a draft head: (batch, temperature, ratio, interval, verdict, accepted)."""
    return [
        (
            str(row["batch"]),
            f"{row['temperature']:g}",
            *(
                (wording.MISSING, wording.MISSING)
                if row["speedup"] is None
                else (f"{row['speedup']:.2f}x", f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}")
            ),
            str(row["verdict"]),
            f"{row['accepted_tokens']:,} of {row['proposed_tokens']:,}",
        )
        for event in history.of("acceptance")[-1:]
        for row in event["served"]
    ]


def _best(history: History, name: str) -> str:
    """Return the best validation loss, where the last one is another."""
    points = history.series(name)
    if name != f"{HELD_OUT}loss" or len(points) < 2:
        return ""
    step, value = min(points, key=lambda point: point[1])
    return f"best {value:.4f} at step {step:,}" if step != points[-1][0] else "the best so far"


def _account(folder: Path) -> dict[str, Any] | None:
    """Return the ledger's figures as words; None if the run folder has no ledger."""
    try:
        account: Account = read_account(folder)
    except LedgerError:
        return None
    return {
        "headline": show.headline(account),
        "buckets": [
            (name, show.duration(seconds), seconds / account.wall, BUCKETS[name])
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


def _sources(history: History) -> Iterator[tuple[str, int, str, str]]:
    """Yield (source, files, tokens or rows, how often it was read) as the last start found them."""
    sources = history.start.get("data")
    if not isinstance(sources, dict):
        return
    mixture = history.run.get("data", {}).get("mixture") or {}
    weights = {name: float(mixture[name]["weight"]) if name in mixture else 1.0 for name in sources}
    seen = next((history.latest()[unit] for unit in COUNTED if unit in history.latest()), 0.0)
    for name, facts in sources.items():
        share, held = weights[name] / sum(weights.values()), facts.get("tokens", facts.get("samples", 0))
        read = f"{share * seen / held:.2f} times" if held else wording.MISSING
        yield name, facts["files"], f"{held:,}", read


def _samples(history: History) -> list[tuple[Any, list[tuple[str, str]]]]:
    """Return (step, its samples as prompt and continuation), the newest step first."""
    by_step: dict[Any, list[tuple[str, str]]] = {}
    for event in history.of("sample")[-LISTED:]:
        text, prompt = str(event.get("text")), str(event.get("prompt", ""))
        begun = prompt if text.startswith(prompt) else ""
        by_step.setdefault(event.get("at"), []).append((begun, text[len(begun) :]))
    return list(by_step.items())[::-1]


def _latest(events: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Return the last event for each value of `keys`: every start reports the same files again."""
    return list({tuple(str(event.get(key)) for key in keys): event for event in events}.values())


def _pairs(rows: Any) -> list[tuple[Any, Any]]:
    return (
        [(row[0], row[1]) for row in rows if isinstance(row, list) and len(row) == 2]
        if isinstance(rows, list)
        else []
    )


def _message(event: dict[str, Any]) -> str:
    """Return an event in one line."""
    facts = {name: value for name, value in event.items() if name not in ("event", "at")}
    plain = {name: value for name, value in facts.items() if not isinstance(value, list | dict)}
    words = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in plain.items())
    return f"{event['event'].replace('_', ' ')}{': ' if words else ''}{words}"
