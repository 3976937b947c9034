"""The server's log, and the escaping of untrusted text in it: clients choose names and paths, but never add lines."""

from __future__ import annotations

import logging
import time
from typing import Any

from torchwright.core.request_line import LINE_FORMAT

LINE_CHARACTERS = 1000
"""The most characters of a log line, and of an error's message."""
TRACEBACK_CHARACTERS = 16_000


def begin_log() -> None:
    """Let this process write its log to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(LINE_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class LineFormatter(logging.Formatter):
    """One line for each message, and a traceback's lines set in, so that none of them passes for a message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        lines = cut(super().formatException(ei), TRACEBACK_CHARACTERS).split("\n")
        return "\n".join(f"    {one_line(line)}" for line in lines)


class Once:
    """Logs a warning once in `seconds`, with the number of those that were left out since."""

    def __init__(self, log: logging.Logger, seconds: float = 1.0) -> None:
        self._log, self._seconds = log, seconds
        self._last: float | None = None
        self._left_out = 0

    def warning(self, text: str) -> None:
        now = time.monotonic()
        if self._last is not None and now - self._last < self._seconds:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._log.warning("%s%s", text, more)
        self._last, self._left_out = now, 0


def one_line(text: str, most: int = LINE_CHARACTERS) -> str:
    """Text as one line that no terminal acts on: escaped where it cannot be printed, without its middle if too long."""
    short = cut(text, most)
    return short if short.isprintable() else "".join(map(_visible, short))


def cut(text: str, most: int) -> str:
    """Text without its middle where it has more than `most` characters; both ends say something."""
    if len(text) <= most:
        return text
    begin, end = text[: most * 2 // 3], text[-(most // 4) :]
    return f"{begin} … ({len(text)} characters) … {end}"


def _visible(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
