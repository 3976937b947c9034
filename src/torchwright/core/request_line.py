"""The server's log as text: how a line and the entry of a request are written, and how they are read back.

    2026-11-29 19:50:32,123 torchwright.serve INFO req-0123…: POST /v1/chat/completions 200, done, 0.412 s

Paths and names come from clients. A path is written without spaces, and a user's name as a quoted text, so that neither
passes for another part of the entry.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from datetime import UTC, datetime

LINE_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"
"""The format of a line, for `logging`; the time is the machine's local time."""
_LINE = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ([\w.-]{1,100}) (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)",
    re.DOTALL,
)
_ENTRY = re.compile(
    r"(?P<id>req-[0-9a-f]{24}): (?P<method>[^\s]{1,40}) (?P<path>[^\s]*) (?P<status>\d{1,3}), (?P<reason>.*?)"
    r"(?:, (?P<prompt>\d{1,12}) prompt tokens, (?P<new>\d{1,12}|None) new)?"
    r"(?:, user (?P<user>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"))?"
    r", (?P<seconds>\d{1,9}\.\d{3}) s"
)


@dataclass(frozen=True)
class LogLine:
    """One line of the log."""

    time: datetime
    logger: str
    level: str
    message: str


@dataclass(frozen=True)
class RequestEntry:
    """The access log's entry of one request."""

    id: str
    method: str
    path: str
    status: int
    reason: str
    """`done`, the reason that the answer ended for, or the error's message."""
    seconds: float
    """From the request's first byte to the end of the answer."""
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    user: str | None = None

    def __str__(self) -> str:
        """Write the entry, in the form that `read_entry` reads."""
        facts = [f"{self.method} {self.path.replace(' ', '%20')} {self.status}", self.reason or "done"]
        if self.prompt_tokens is not None:
            facts.append(f"{self.prompt_tokens} prompt tokens, {self.new_tokens} new")
        if self.user is not None:
            facts.append(f"user {self.user!r}")
        return f"{self.id}: {', '.join(facts)}, {self.seconds:.3f} s"


def read_line(text: str) -> LogLine | None:
    """Read a line of the log; None for the lines of a traceback, or of another program."""
    found = _LINE.fullmatch(text)
    if found is None:
        return None
    try:
        local = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").astimezone()
        return LogLine(local.astimezone(UTC).replace(tzinfo=None), found[2], found[3], found[4])
    except (ValueError, OverflowError, OSError):  # a month of 13, a year that the clock does not know
        return None


def read_entry(message: str) -> RequestEntry | None:
    """Read the entry of a request from a line's message; None for any other message, or one that was cut."""
    found = _ENTRY.fullmatch(message)
    if found is None:
        return None
    return RequestEntry(
        id=found["id"],
        method=found["method"],
        path=found["path"],
        status=int(found["status"]),
        reason=found["reason"],
        seconds=float(found["seconds"]),
        prompt_tokens=_count(found["prompt"]),
        new_tokens=_count(found["new"]),
        user=_unquoted(found["user"]),
    )


def _count(digits: str | None) -> int | None:
    return None if digits in (None, "None") else int(digits)


def _unquoted(text: str | None) -> str | None:
    """Return the text that `repr` quoted; as it stands if the escapes are not Python's."""
    if text is None:
        return None
    try:
        return str(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return text
