"""A profile in a terminal. Names and lines are the user's, and never read as rich markup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from torchwright.optimization.profile.rates import ABOVE_CEILING
from torchwright.optimization.profile.values import (
    Breaks,
    GraphBreak,
    Kind,
    OperatorTime,
    Profile,
    ProfiledStage,
    Rate,
    Recording,
)
from torchwright.report import wording

TOP = 10
"""Operators shown of each stage."""
EXPLAINED: dict[Kind, str] = {
    "idle": "Python and dispatch, no operator ran",
    "compiled code": "kernels without names (--rungs)",
}


def shown(profile: Profile, top: int = TOP) -> RenderableType:
    """Print a line of kinds for each stage, the longest operators of each, and the graph breaks."""
    parts: list[RenderableType] = [*_head(profile), Text()]
    parts += [_kinds(profile.stages), Text()]
    for stage in profile.stages:
        parts += [*_stage(stage, top), Text()]
    if profile.breaks is not None:
        parts += [*_breaks(profile.breaks), Text()]
    if profile.trace is not None:
        parts += [_words(f"trace: {profile.trace} (open it at ui.perfetto.dev)", "dim"), Text()]
    return Group(*parts[:-1])


def _head(profile: Profile) -> Iterator[Text]:
    machine = profile.machine
    rates = [f"{machine.read_gb_per_s:.3g} GB/s"] if machine.read_gb_per_s else []
    rates += [f"{rate * 1e3:,.0f} GFLOP/s {dtype}" for dtype, rate in machine.tflops.items()]
    yield _words(f"Where the time of {profile.target} goes", "bold")
    yield _words(f"{machine.name}, {profile.threads} threads, torch {profile.torch}", "dim")
    reason = f": {profile.disturbed}" if profile.disturbed else ""
    yield _words(f"at most: {', '.join(rates) or 'not measured' + reason}", "dim")


def _kinds(stages: Sequence[ProfiledStage]) -> Table:
    """A row for each stage, a column for each kind on which any of them spends time."""
    recorded = [stage.recording for stage in stages if stage.recording]
    spent = {found.kind for recording in recorded for found in recording.kinds if found.share >= 0.0005}
    kinds = [kind for kind in get_args(Kind) if kind in spent]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("stage")
    for title in ("one pass", *kinds):
        table.add_column(title, justify="right", vertical="bottom", max_width=12)
    for stage in stages:
        if stage.recording is None:
            table.add_row(_words(stage.name), *[wording.MISSING] * (1 + len(kinds)))
            continue
        shares = {found.kind: found.share for found in stage.recording.kinds}
        cells = [_share(shares[kind]) if kind in shares else wording.MISSING for kind in kinds]
        table.add_row(_words(stage.name), wording.seconds(stage.recording.unrecorded_seconds), *cells)
    return table


def _stage(stage: ProfiledStage, top: int) -> Iterator[RenderableType]:
    title = f"{stage.name}, {stage.runs_as}" if stage.runs_as else stage.name
    if stage.recording is None:
        yield _words(title, "bold").append_text(_words(f": not profiled. {stage.failed}", "not bold yellow"))
        return
    yield _words(title, "bold").append_text(_words(f": {_calls(stage.recording)}", "not bold dim"))
    yield _operators(stage.recording, top)
    for note in stage.notes:
        yield _words(f"note: {note}", "yellow")


def _calls(recording: Recording) -> str:
    """Return the calls of one pass."""
    calls = [
        f"{call.name} {wording.seconds(call.unrecorded_seconds)}"
        + (f" x {call.repeat}" if call.repeat > 1 else "")
        for call in recording.calls
    ]
    text = f"{', '.join(calls)}; recorded {wording.seconds(recording.seconds)}"
    if recording.operations and recording.computing_seconds:
        rate = recording.operations / recording.computing_seconds / 1e9
        text += f"; {wording.three(recording.operations / 1e9)} GFLOP at {wording.three(rate)} GFLOP/s"
    return text


def _operators(recording: Recording, top: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("operator", no_wrap=True, overflow="ellipsis")
    for title in ("calls", "own time", "share", "achieved", "of machine"):
        table.add_column(title, justify="right", no_wrap=True)
    for operator in recording.operators[:top]:
        table.add_row(
            _words(operator.name),
            f"{operator.calls:,.0f}",
            wording.seconds(operator.seconds),
            _share(operator.share),
            *achieved(operator.rate),
        )
    for row in _rest(recording.operators[top:]):
        table.add_row(*row)
    for found in recording.kinds:
        if found.kind in EXPLAINED:
            message = Text(f"{found.kind}: {EXPLAINED[found.kind]}")
            table.add_row(message, "", wording.seconds(found.seconds), _share(found.share))
    return table


def _rest(operators: Sequence[OperatorTime]) -> Iterator[tuple[RenderableType, ...]]:
    """The operators that have no row, together."""
    if operators:
        seconds = sum(operator.seconds for operator in operators)
        share = sum(operator.share for operator in operators)
        calls = sum(operator.calls for operator in operators)
        name = Text(f"{len(operators)} more (--top)", "dim")
        yield name, f"{calls:,.0f}", wording.seconds(seconds), _share(share), "", ""


def achieved(rate: Rate | None) -> tuple[str, str]:
    """The rate that is nearer to the machine's, and its share of that."""
    if rate is None or (rate.gflops is None and rate.gb_per_s is None):
        return "", ""
    if rate.gflops is not None and (rate.bound_by != "bytes" or rate.gb_per_s is None):
        text = f"{_rate(rate.gflops)} GFLOP/s {rate.dtype}"
    else:
        text = f"{_rate(rate.gb_per_s or 0.0)} GB/s"
    if rate.share is None:
        return text, ""
    return text, "from cache" if rate.share > ABOVE_CEILING else f"{rate.share:.0%}"


def _rate(value: float) -> str:
    return wording.three(value) if value >= 0.1 else f"{value:.2f}"


def _breaks(breaks: Breaks) -> Iterator[RenderableType]:
    graphs = f"{breaks.graphs} graph" + ("" if breaks.graphs == 1 else "s")
    if breaks.failed:
        yield _words(f"torch.compile failed on the original: {breaks.failed}", "yellow")
    elif not breaks.found:
        yield _words(f"no graph breaks: torch.compile makes {graphs} of the original's calls", "green")
    if breaks.found:
        yield _words("Where compiling the original breaks off", "bold").append_text(
            _words(
                f": {len(breaks.found)} line{'' if len(breaks.found) == 1 else 's'}, {graphs}", "not bold dim"
            )
        )
    for found in breaks.found:
        yield from _break(found)


def _break(found: GraphBreak) -> Iterator[RenderableType]:
    times = f", {found.count} times" if found.count > 1 else ""
    yield _words(f"{_near(found.file)}:{found.line}", "cyan").append_text(
        _words(f"  {found.cause}{times}", "yellow")
    )
    if found.text:
        yield Padding(_words(found.text, "bold"), (0, 0, 0, 4))
    reason = found.reason + (" The whole function around it runs uncompiled." if found.whole_function else "")
    yield Padding(_words(reason), (0, 0, 0, 4))
    yield Padding(_words(f"Cure: {found.cure}", "green"), (0, 0, 0, 4))
    if found.rewritten:
        yield Padding(_words("whole_graph rewrites it", "green"), (0, 0, 0, 4))
    elif found.left:
        yield Padding(_words(f"whole_graph leaves it: {found.left}", "yellow"), (0, 0, 0, 4))
    if found.cause == "unsupported call":
        yield Padding(_words(f"torch says: {found.torch_says}", "dim"), (0, 0, 0, 4))


def _near(file: str) -> str:
    """A file's path from here, where it lies below."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _share(share: float) -> str:
    return f"{share:.1%}"


def _words(text: str, style: str = "") -> Text:
    return Text(wording.clean(text), style=style)
