"""The answer: one paragraph, and the evidence for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "never came", "dead", "shape", "dtype", "order", "wrong group", "failed", "slow", "not ended", "nothing"
]


@dataclass(frozen=True)
class RankFinding:
    """One rank's part in it."""

    rank: int
    part: str
    """The rank's action, or missing action."""
    call: str
    """The collective with its number, shapes and dtype."""
    line: str
    """The program's own line of that call."""
    now: str
    """The position of its main thread, or the exception that ended it."""


@dataclass(frozen=True)
class Finding:
    """Why a job is stuck."""

    kind: Kind
    answer: str
    """One paragraph."""
    ranks: tuple[int, ...] = ()
    """The ranks at fault; both sides where neither is in the majority."""
    group: str = ""
    members: tuple[int, ...] = ()
    seq: int | None = None
    """The call's number in its group."""
    rows: tuple[RankFinding, ...] = ()
    notes: tuple[str, ...] = field(default=())
