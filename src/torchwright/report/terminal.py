"""The search as it runs and its result, in a terminal.

`LiveProgress` goes to stderr and vanishes when the search has ended well, for the waterfall then says it all.
Text from recipes and compilers is never read as rich markup.
"""

from __future__ import annotations

import io
import shlex
import textwrap
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from torchwright.core.records import Event, Interval, Recipe, StepResult
from torchwright.report import view, wording
from torchwright.report.ascii import to_ascii
from torchwright.report.console import SafeConsole, moves

PLAIN_WIDTH = WIDEST = 100
"""A table wider than this is hard to follow along its rows."""

MOST_STEPS = 12
"""More steps than these are counted: a table longer than a screen hides its total."""

NARROWEST = 64
"""In a narrower terminal the lines of the table are folded."""

LEGEND = (
    "speed-up: against the best recipe before the step. pays back: after so many calls the compile time is won "
    "back. The total below was measured once more, at the end."
)
"""The legend of the table."""

_STYLE = {
    "kept": "bold green",
    "dropped": "yellow",
    "refused": "dim",
    "failed": "red",
    "removed": "yellow",
    "inconclusive": "magenta",
    "untried": "magenta",
    "skipped": "dim",
}


def waterfall(recipe: Recipe, *, artifact: str | None = None, every: bool = False) -> RenderableType:
    """Return the recipe as a table: one row for each step that was tried, and the totals below.

    Refused steps, and steps beyond `MOST_STEPS`, are counted in one line; with `every` each has its row and its
    reason. The table is meant for 80 columns and more. With `artifact`, the folder of the result, it ends with the
    next commands.
    """
    return _Waterfall(recipe, artifact, every)


def plain(recipe: Recipe) -> str:
    """Return `waterfall` as plain text, 100 columns wide, without a newline at the end."""
    file = io.StringIO()
    console = SafeConsole(
        file=file, width=PLAIN_WIDTH, color_system=None, force_terminal=False, legacy_windows=False
    )
    console.print(waterfall(recipe))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).strip("\n")


class LiveProgress:
    """Shows a search's events as they come.

        with LiveProgress() as progress:
            search(..., on_event=progress)

    A live table on a terminal; elsewhere (a pipe, CI) one plain line per event; nothing with `quiet`.
    `console` defaults to stderr.
    """

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._quiet = quiet
        self._console = console if console is not None else SafeConsole(stderr=True, highlight=False)
        self._moving = not quiet and moves(self._console)
        utf = self._console.encoding.lower().startswith("utf")
        self._spinner = Spinner("dots" if utf else "line", style="cyan")
        self._live: Live | None = None
        self._original = ""
        self._now = "starting"
        self._rungs: tuple[tuple[str, StepResult], ...] = ()
        """Each with its number, "" for untried steps."""
        self._trying = False
        self._refused: set[str] = set()
        self._best: Interval | None = None
        self._elapsed, self._budget, self._heard = 0.0, 0.0, time.monotonic()

    def __enter__(self) -> Self:
        if self._moving:
            self._heard = time.monotonic()
            self._live = Live(self, console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._refused and not self._quiet and not self._moving:
            self._console.print(view.does_not_apply(len(self._refused)))
        if self._live is not None:
            # What was measured before a fault or Ctrl-C stays on the screen: nothing else will show it.
            self._live.transient = kind is None
            self._live.stop()
            self._live = None

    def __call__(self, event: Event) -> None:
        if self._quiet:
            return
        rung, tried = event.rung, self._trying
        self._trying = event.kind == "trying"
        if rung is not None and rung.status == "refused" and not tried:
            # Most techniques are for other kinds of models: their reasons would hide what is tried.
            self._refused.add(rung.step.name)
            return
        number = ""
        if rung is not None:
            tried_before = sum(bool(number) for number, _ in self._rungs)
            number = "" if rung.status == "untried" else str(tried_before + 1)
            self._rungs = (*self._rungs, (number, rung))
        if not self._moving:
            self._console.print(Text(_line(event, number)), soft_wrap=True)
            return
        self._elapsed, self._budget, self._heard = event.elapsed, event.time_budget, time.monotonic()
        self._best = event.best or self._best
        if event.kind == "baseline":
            self._original = event.text
        elif rung is not None:
            self._now = "choosing the next step"
        elif event.kind == "notice":
            self._console.print(Text.assemble(("notice  ", "yellow"), wording.clean(event.text)))
        else:
            self._now = event.text
        if self._live is not None:
            self._live.refresh()

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._original:
            refused = view.does_not_apply(len(self._refused)) if self._refused else ""
            parts.append(_one_line(("original", "bold"), self._original, (refused, "dim")))
        room = max(self._console.height - 6, 3)
        if len(self._rungs) > room:
            parts.append(Text(f"… {len(self._rungs) - room} earlier", style="dim"))
        if self._rungs:
            table = Table.grid(padding=(0, 2, 0, 0), expand=True)
            table.add_column(no_wrap=True, width=len(str(len(self._rungs))), justify="right", style="dim")
            table.add_column(no_wrap=True, width=max(map(len, _STYLE)))
            table.add_column(no_wrap=True, overflow="ellipsis", ratio=2)
            table.add_column(no_wrap=True, width=len("10.00x"), justify="right")
            table.add_column(no_wrap=True, overflow="ellipsis", ratio=3, style="dim")
            for number, rung in self._rungs[-room:]:
                table.add_row(
                    number,
                    Text(rung.status, style=_STYLE[rung.status]),
                    Text(wording.elide(str(rung.step), 200), style="bold" if rung.kept else ""),
                    "" if rung.speedup is None else wording.ratio(rung.speedup),
                    Text(wording.elide(rung.reason, 200)),
                )
            parts.append(table)
        parts.append(self._status())
        return Group(*parts)

    def _status(self) -> RenderableType:
        elapsed = self._elapsed + time.monotonic() - self._heard
        self._spinner.update(text=_one_line((self._now, "bold")))
        clock = Text(f"{elapsed:.0f} s", style="cyan")
        if self._budget > 0:
            clock.append(f" of {self._budget:.0f} s", style="dim")
        best = Text() if self._best is None else Text.assemble(("best ", "dim"), (str(self._best), "green"))
        bar = ProgressBar(total=max(self._budget, 1.0), completed=min(elapsed, self._budget), width=16)
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_row(clock, bar, best)
        return Group(self._spinner, grid)


class _Waterfall:
    def __init__(self, recipe: Recipe, artifact: str | None, every: bool) -> None:
        self._recipe, self._artifact, self._every = recipe, artifact, every

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(max(options.max_width, NARROWEST), WIDEST)
        words = _Words(ascii_only=options.ascii_only)
        recipe = self._recipe
        yield words(view.headline(recipe), "bold")
        yield words(view.machine(recipe), "dim")
        yield Text()
        if recipe.rungs:
            yield from self._table(words, width, words(("-" if options.ascii_only else "─") * width, "dim"))
        yield from _totals(recipe, words, width)
        needed = view.needs_module(recipe, self._artifact)
        if needed is not None:
            yield Text()
            yield from _labelled_lines(words, "load", needed, width, "yellow")
        more = view.more(recipe)
        if more is not None:
            yield Text()
            yield from _labelled_lines(words, "untried", more[0], width, "magenta")
            yield from _labelled_lines(words, "", more[1], width, "cyan")
        if recipe.notes:
            yield Text()
        for note in recipe.notes:
            yield words(f"note  {note}", "yellow")
        if self._artifact is not None:
            yield Text()
            yield _labelled(words, "artifact").append_text(words(self._artifact))
            for index, verb in enumerate(("bench", "verify", "report")):
                label = _labelled(words, "" if index else "next")
                yield label.append_text(words(f"torchwright {verb} {_quoted(self._artifact)}", "cyan"))

    def _table(self, words: _Words, width: int, rule: Text) -> Iterator[Text]:
        numbers = {id(rung): f"{number:2d} " for number, rung in view.numbered(self._recipe)}
        shown = self._recipe.rungs if self._every else _most_telling(self._recipe)
        folded = [rung for rung in self._recipe.rungs if not any(rung is each for each in shown)]
        yield from _head(words, width)
        yield rule
        for rung in shown:
            yield from _rung(rung, numbers.get(id(rung), ""), self._recipe, words, width)
        if folded:
            where = (
                "result.steps"
                if self._artifact is None
                else f"torchwright report {_quoted(self._artifact)} --all"
            )
            counted = f"{view.fold(folded)} ({where})"
            for line in textwrap.wrap(counted, width, subsequent_indent=" " * _INDENT):
                yield words(line, "dim")
        yield rule
        for line in textwrap.wrap(LEGEND, width):
            yield words(line, "dim")
        yield Text()


def _quoted(folder: str) -> str:
    return shlex.quote(wording.clean(folder))


class _Words:
    """Makes a Text, in ASCII where the terminal can show no more."""

    def __init__(self, *, ascii_only: bool) -> None:
        self._ascii_only = ascii_only

    def __call__(self, text: str, style: str = "") -> Text:
        text = wording.clean(text)
        if self._ascii_only:
            text = to_ascii(text)
        return Text(text, style=style, overflow="fold")


def _most_telling(recipe: Recipe) -> list[StepResult]:
    """Return at most `MOST_STEPS` numbered rows in their order: the kept ones, then the largest gains."""
    rows = [rung for _, rung in view.numbered(recipe)]
    by_gain = sorted(
        rows, key=lambda rung: (rung.kept, rung.speedup.value if rung.speedup else 0.0), reverse=True
    )
    chosen = {id(rung) for rung in by_gain[:MOST_STEPS]}
    return [rung for rung in rows if id(rung) in chosen]


_COLUMNS = (14, 10, 8, 12)
"""Widths of the numbers, each with the gap to its left."""
_LABEL = 14
_INDENT = 2


def _head(words: _Words, width: int) -> Iterator[Text]:
    left = width - sum(_COLUMNS)
    first = words(f"{'technique':<{left}}", "dim")
    yield _fields(words, first, left, ("speed-up", "memory", "loss", "compile"), ("dim",) * 4)
    second = words(" " * _INDENT + "verdict: reason", "dim")
    yield _fields(words, second, left, ("95% interval", "change", "at most", "pays back"), ("dim",) * 4)


def _rung(rung: StepResult, number: str, recipe: Recipe, words: _Words, width: int) -> Iterator[Text]:
    """Yield a step's lines: figures on the first, bounds on the second; the reason flows around the figures."""
    quality = rung.quality
    first = (
        wording.ratio(rung.speedup),
        wording.size(rung.memory_bytes),
        "" if quality is None else wording.percent(quality.drop),
        wording.seconds(rung.compile_seconds),
    )
    second = (
        wording.bounds(rung.speedup),
        wording.size(rung.memory_change_bytes, signed=True),
        "" if quality is None else f"≤{wording.percent(quality.drop_high)}",
        view.payback(rung),
    )
    numbers = [tuple("" if field == wording.MISSING else field for field in row) for row in (first, second)]
    beside = 2 if any(numbers[0]) or any(numbers[1]) else 0
    left = width - sum(_COLUMNS) if beside else width
    tone = "" if rung.kept else "dim"
    over = "red" if view.over_budget(quality, recipe) else ""

    lines = [words(line, tone) for line in _wrap_options(number + wording.clean(str(rung.step)), left)]
    lines[0].stylize("bold" if rung.kept else "not dim", len(number), len(number) + len(rung.step.name))
    reason = " ".join(wording.clean(view.reason(rung)).split())
    message = f"{rung.status}: {reason}" if reason else rung.status
    # The first line shares its width with the numbers; the others have the whole width.
    short = width - left if len(lines) < beside else 0
    flowed = textwrap.wrap(
        message, width, initial_indent=" " * (_INDENT + short), subsequent_indent=" " * _INDENT
    )
    flowed[0] = flowed[0][short:]
    for index, line in enumerate(flowed):
        text = words(line.strip(), "dim")
        if index == 0:
            text.stylize(f"not dim {_STYLE[rung.status]}", 0, len(rung.status))
        lines.append(Text(" " * _INDENT).append_text(text))

    for index, line in enumerate(lines):
        if index >= beside:
            yield line
            continue
        styles = (
            (tone or "bold", tone, over or tone, tone) if index == 0 else ("dim", "dim", over or "dim", "dim")
        )
        yield _fields(words, line, left, numbers[index], styles)


def _wrap_options(step: str, width: int) -> list[str]:
    """A step's text in lines that end, where they can, after a comma."""
    # The vertical tab is white space to textwrap and has been cleaned from the text.
    lines = textwrap.wrap(step.replace(",", ",\v"), width, replace_whitespace=False, expand_tabs=False)
    return [line.replace("\v", "") for line in lines] or [""]


def _fields(words: _Words, line: Text, left: int, fields: Sequence[str], styles: Sequence[str]) -> Text:
    """`line` padded to `left`, then the fields, each to the right of its column."""
    result = Text(no_wrap=True).append_text(line)
    result.append(" " * (left - cell_len(line.plain)))
    for text, style, column in zip(fields, styles, _COLUMNS, strict=True):
        field = words(text, style)
        result.append(" " * max(column - len(field), 1)).append_text(field)
    return result


def _totals(recipe: Recipe, words: _Words, width: int) -> Iterator[Text]:
    """Yield the total and its subject, one line per case, other batch sizes, memory, the metric and the engine."""
    base, final = recipe.baseline, recipe.final
    pairs = [pair for pair in view.case_pairs(recipe) if not view.is_total(pair, recipe)]
    names = [pair.name if not pair.often else f"{pair.name} x{pair.often}" for pair in pairs]
    good = "bold green" if view.kept(recipe) else "bold"
    total = _times(words, "total", base.seconds, final.seconds)
    yield total.append_text(words(str(recipe.speedup), good))
    for name, pair in zip(names, pairs, strict=True):
        line = _times(words, name, pair.before, pair.after).append_text(words(wording.ratio(pair.speedup)))
        before, after = pair.rate(pair.before), pair.rate(pair.after)
        if before is not None and after is not None:
            line.append("   ").append_text(words(f"{wording.three(before)} → {wording.three(after)} tok/s"))
        yield line
    parts = [f"{each.name} {each.before:.0%} → {each.after:.0%}" for each in view.shares(recipe)]
    if parts:
        yield from _labelled_lines(words, "time in", ", ".join(parts), width)
    for found in view.rankings(recipe):
        yield from _labelled_lines(words, "layers", found.said, width)
    rows = view.row_times(recipe)
    if rows:
        numbers = " / ".join(f"{found.rows:,}" for found in rows)
        ratios = " / ".join(wording.ratio(found.speedup) for found in rows)
        yield from _labelled_lines(words, "rows", f"{numbers}: {ratios}", width)
    counted = "; ".join(view.rates(recipe))
    if counted:
        yield from _labelled_lines(words, "rates", counted, width)
    gain = view.process_gain(recipe)
    if gain is not None:
        yield from _labelled_lines(words, "process", gain, width)
    if base.peak_memory_bytes > 0:
        peak = f"peak {wording.size(base.peak_memory_bytes)} → {wording.size(final.peak_memory_bytes)}"
        weights = f"weights {wording.size(base.weight_bytes)} → {wording.size(final.weight_bytes)}"
        yield _labelled(words, "memory").append_text(words(f"{peak}, {weights}"))
    over = "red" if view.over_budget(final.quality, recipe) else ""
    yield from _labelled_lines(words, "quality", view.loss(recipe), width, over)
    spent = f"found in {recipe.search_seconds:,.0f} s of {recipe.budget.time_seconds:,.0f} s allowed"
    yield _labelled(words, "engine").append_text(words(f"{recipe.engine}, {spent}"))
    way = view.runs_as(recipe)
    if recipe.runs_as and recipe.steps:
        way += "; the total is of this, loaded in a fresh process"
    if way:
        yield from _labelled_lines(words, "runs as", way, width)


def _times(words: _Words, label: str, before: float, after: float) -> Text:
    arrow = words("→")
    line = _labelled(words, label).append_text(words(wording.seconds(before))).append(" ").append_text(arrow)
    line.append(" ").append_text(words(wording.seconds(after)))
    return line.append(" " * max(_LABEL + 20 - cell_len(line.plain), 2))


def _labelled_lines(words: _Words, label: str, text: str, width: int, style: str = "") -> Iterator[Text]:
    """Yield a sentence with `label` in the first column and the text folded in the second."""
    for index, line in enumerate(textwrap.wrap(text, width - _LABEL)):
        yield _labelled(words, "" if index else label).append_text(words(line, style))


def _labelled(words: _Words, label: str) -> Text:
    """The start of a line with `label` in its first column; a longer label pushes the rest along."""
    return Text().append_text(words(label, "dim")).append(" " * max(_LABEL - cell_len(label), 2))


def _one_line(*parts: str | tuple[str, str]) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for part in parts:
        if text:
            text.append("  ")
        words, style = (part, "") if isinstance(part, str) else part
        text.append(wording.elide(words, 200), style=style)
    return text


def _line(event: Event, number: str) -> str:
    """Return an event as a line for a pipe or a log; a step has a number."""
    rung = event.rung
    if rung is None:
        return f"[{event.elapsed:7.1f} s] {event.kind:<8} {wording.elide(event.text, 400)}"
    known = rung.speedup is None or rung.reason.startswith(str(rung.speedup))
    speedup = "" if known else f" {rung.speedup}"
    message = f"{rung.step}{speedup}: {rung.reason}" if rung.reason else f"{rung.step}{speedup}"
    return f"[{event.elapsed:7.1f} s] {number:>2} {rung.status:<8} {wording.elide(message, 400)}"
