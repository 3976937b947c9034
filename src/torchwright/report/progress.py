"""The progress of rows on a terminal: a bar, rows per second, and the time that is left."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from torchwright.core.escapes import escaped
from torchwright.report.console import SafeConsole, moves

SPEED_SECONDS = 120.0
"""Time over which the speed is estimated: several parts."""


class RowProgress:
    """Shows on standard error how far a run over rows is; nothing where that is not a terminal, or with `quiet`."""

    def __init__(self, *, quiet: bool) -> None:
        console = SafeConsole(stderr=True, highlight=False)
        self._shown = not quiet and moves(console)
        self._bar = Progress(
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            speed_estimate_period=SPEED_SECONDS,
            disable=not self._shown,
        )
        self._task = self._bar.add_task("", total=None, shown="loading the model")
        self._rows = self._rejected = self._computed = 0
        self._begun: float | None = None

    def begin(self, bytes_total: int | None) -> None:
        """The inputs have so many bytes, None where that is not known."""
        self._bar.update(self._task, total=bytes_total)

    def advance(self, *, bytes_read: int, rows: int, rejected: int, there: bool) -> None:
        """A part is done, now or by an earlier run (`there`), whose time is not counted."""
        now = self._bar.get_time()
        self._rows += rows
        self._rejected += rejected
        shown = f"{self._rows:,} rows"
        if there:  # what is left to compute is the whole
            total = self._bar.tasks[0].total
            self._bar.update(self._task, total=None if total is None else total - bytes_read)
        elif self._begun is None:  # the first part's time began with the model's loading
            self._begun = now
            self._bar.advance(self._task, bytes_read)
        else:
            self._computed += rows
            shown += f", {self._computed / max(now - self._begun, 1e-3):,.0f} rows/s"
            self._bar.advance(self._task, bytes_read)
        if self._rejected:
            shown += f", {self._rejected:,} rejected"
        self._bar.update(self._task, shown=shown)

    def say(self, text: str) -> None:
        """Write a line above the bar."""
        if self._shown:
            self._bar.console.print(text, markup=False, soft_wrap=True)
        else:
            sys.stderr.write(f"{escaped(text)}\n")
            sys.stderr.flush()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
