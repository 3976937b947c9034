"""The account as a table in a terminal and as plain data."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchwright.report import wording
from torchwright.train.ledger.account import Account, Attempt
from torchwright.train.ledger.buckets import BUCKETS, NANO

_NOT_TRAINING = "yellow"


def table(account: Account) -> RenderableType:
    """Buckets with their seconds, share and slowest rank; attempts; notes."""
    seconds = account.seconds()
    ranks = len({rank for attempt in account.attempts for rank in attempt.lanes})
    buckets = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("bucket", "time", "share", "rank with most", ""):
        buckets.add_column(title, justify="left" if title in ("bucket", "") else "right", no_wrap=title != "")
    for bucket, meaning in BUCKETS.items():
        if not seconds[bucket]:
            continue
        rank, most = account.most(bucket)
        buckets.add_row(
            Text(bucket.replace("_", " "), style="bold green" if bucket == "step" else ""),
            duration(seconds[bucket]),
            wording.percent(seconds[bucket] / account.wall),
            f"{rank}: {duration(most)}" if ranks > 1 and most else "",
            Text(meaning, style="dim"),
        )
    buckets.add_section()
    buckets.add_row("wall time", duration(account.wall), "100%", "", Text(_span(account), style="dim"))
    parts: list[RenderableType] = [
        Text(headline(account), style="bold"),
        Text(_about(account, ranks), style="dim"),
        "",
        buckets,
    ]
    if len(account.attempts) > 1:
        parts += ["", _attempts(account)]
    parts += [Text(f"note: {note}", style=_NOT_TRAINING) for note in account.notes]
    return Group(*parts)


def headline(account: Account) -> str:
    """Return the effective training time in words."""
    return f"Effective training time: {100 * account.effective:.1f}% of {duration(account.wall)}"


def plain(account: Account) -> dict[str, Any]:
    """Return the account as plain data, in seconds."""
    return {
        "effective_training_time": account.effective,
        "wall_seconds": account.wall,
        "started": account.start / NANO,
        "ended": account.end / NANO,
        "between_attempts_seconds": account.between,
        "seconds": account.seconds(),
        "most": {
            bucket: {"rank": rank, "seconds": seconds}
            for bucket in BUCKETS
            for rank, seconds in [account.most(bucket)]
        },
        "attempts": [
            {
                "number": attempt.number,
                "started": attempt.start / NANO,
                "ended": attempt.end / NANO,
                "world": attempt.world,
                "finished": attempt.finished,
                "failed": attempt.failed,
                "resumed_from_step": attempt.resumed,
                "reached_step": attempt.reached,
                "saved_step": attempt.saved,
                "graphs_found": attempt.found,
                "graphs_compiled": attempt.made,
                "seconds": attempt.seconds(),
                "ranks": {
                    str(rank): {bucket: spent / NANO for bucket, spent in attempt.spent(rank).items()}
                    for rank in attempt.lanes
                },
            }
            for attempt in account.attempts
        ],
        "notes": account.notes,
    }


def steps_of(attempt: Attempt) -> str:
    """Return the steps of an attempt as `120 → 480`: the step that it resumed, and the last one."""
    return f"{attempt.resumed or 0} → {attempt.reached}"


def how_ended(attempt: Attempt, last: bool) -> str:
    """Return how an attempt ended: finished, failed, died, or perhaps still running."""
    if attempt.finished:
        return "finished"
    if attempt.failed:
        return "failed"
    return "running or dead" if last else "died"


def duration(seconds: float) -> str:
    """Return seconds in words: 12.3 ms, 45.6 s, 12 min 5 s, 31 h 12 min."""
    if seconds < 120:
        return wording.seconds(seconds)
    whole = round(seconds)
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def clock(nanoseconds: int) -> str:
    """Return local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(nanoseconds / NANO))


def _attempts(account: Account) -> Table:
    attempts = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("attempt", "began", "lasted", "steps", "training", "lost work", "recovery", "ended"):
        attempts.add_column(title, justify="left" if title in ("began", "ended") else "right", no_wrap=True)
    for attempt in account.attempts:
        seconds = attempt.seconds()
        lasted = (attempt.end - attempt.start) / NANO
        attempts.add_row(
            str(attempt.number),
            clock(attempt.start),
            duration(lasted),
            steps_of(attempt),
            wording.percent(seconds["step"] / lasted) if lasted else wording.MISSING,
            duration(seconds["lost_work"]),
            duration(seconds["recovery"]),
            how_ended(attempt, last=attempt is account.attempts[-1]),
        )
    return attempts


def _about(account: Account, ranks: int) -> str:
    many = len(account.attempts)
    return (
        f"{many} attempt{'s' * (many > 1)}, {ranks} rank{'s' * (ranks > 1)}; step "
        f"{max(attempt.reached for attempt in account.attempts)} reached"
        + ("; means over ranks" if ranks > 1 else "")
    )


def _span(account: Account) -> str:
    return f"{clock(account.start)} to {clock(account.end)}"
