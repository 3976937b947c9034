"""`torchwright train --watch OUT`: a run's figures in a second terminal, while it trains (no torch).

It reads the run's metrics.jsonl and can be started and left at any time. So it follows a run under torchrun or Slurm,
on another machine with the same disk, and across restarts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from torchwright.report import wording
from torchwright.report.console import moves
from torchwright.train.ledger.show import duration
from torchwright.train.run.observe.history import History, Tail
from torchwright.train.run.observe.metrics import metrics_message

ENDED = {"end": "finished", "left": "left as it was asked to", "stopped": "stopped"}
PAUSE = 0.5
"""Seconds between two looks at the file."""
CURVE = 10
"""Lines of the loss curve."""
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille letter, by row and column of its dots."""


def watch(folder: Path, console: Console) -> None:
    """Show the run's state until it has ended; if the output is not a terminal, show it once."""
    tail = Tail(folder)
    tail.read()
    if not moves(console):
        console.print(screen(folder, tail.history, 0.0, width=100))
        return
    since = time.monotonic()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            shown = screen(folder, tail.history, time.monotonic() - since, width=console.width)
            live.update(shown, refresh=True)
            if tail.history.end is not None:
                return
            time.sleep(PAUSE)
            if tail.read():
                since = time.monotonic()


def screen(folder: Path, history: History, quiet: float, *, width: int) -> RenderableType:
    """Lay out progress, last figures, loss curve and last event; `quiet` are seconds since the last new line."""
    parts: list[RenderableType] = [Text(wording.clean(str(folder)), style="bold"), _progress(history, quiet)]
    if history.figures:
        parts += [
            Text(metrics_message(history.latest())),
            *curve(history.series("loss"), width=min(width, 100) - 12),
        ]
    for sample in history.of("sample")[-1:]:
        parts.append(Text(f"step {sample.get('at')}: {wording.elide(str(sample.get('text')), 200)}", "dim"))
    end = history.end
    if end is not None:
        reason = wording.elide(str(end.get("reason", "")), 1000)
        parts.append(Text(f"{ENDED[end['event']]} after step {end.get('at')}  {reason}", style="bold"))
    return Group(*parts)


def _progress(history: History, quiet: float) -> RenderableType:
    left = history.remaining
    words = f"step {history.step:,}" + (f" of {history.steps:,}" if history.steps else "")
    words += f", {duration(left)} left" if left is not None else ""
    words += f"; nothing new for {duration(quiet)}" if quiet >= 60 else ""
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=history.steps, completed=history.step, width=24) if history.steps else Text()
    grid.add_row(bar, Text(words))
    return grid


def curve(points: Sequence[tuple[int, float]], *, width: int) -> list[Text]:
    """Draw a figure over the steps in braille: `CURVE` lines of `width` letters, interpolated between steps."""
    if len(points) < 2:
        return []
    columns = 2 * width
    values = _resampled(points, columns)
    low, high = min(values), max(values)
    letters = [[0x2800] * width for _ in range(CURVE)]
    for column, value in enumerate(values):
        share = (high - value) / (high - low) if high > low else 0.5
        row = round(share * (4 * CURVE - 1))
        letters[row // 4][column // 2] |= DOTS[row % 4][column % 2]
    edge = {0: f"{high:.3f}", CURVE - 1: f"{low:.3f}"}
    return [Text(f"{edge.get(row, ''):>9} {''.join(map(chr, line))}") for row, line in enumerate(letters)]


def _resampled(points: Sequence[tuple[int, float]], columns: int) -> list[float]:
    """Return the figure at `columns` places spread evenly over the steps."""
    first, last = points[0][0], points[-1][0]
    values, after = [], 1
    for column in range(columns):
        step = first + (last - first) * column / (columns - 1)
        while points[after][0] < step and after < len(points) - 1:
            after += 1
        (one, before), (two, then) = points[after - 1], points[after]
        values.append(before + (then - before) * (step - one) / (two - one))
    return values
