"""Escape sequences that an output stream takes: colours where they are wanted, a moving cursor where there is one.

`NO_COLOR` in the environment, not empty, turns off colours and other styles. A terminal of type `dumb` takes neither.
"""

from __future__ import annotations

import os
from typing import IO

CLEAR_LINE = "\r\x1b[K"
"""Return to the start of the line and erase it."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
DUMB = frozenset({"dumb", "unknown"})
"""Types of terminal (`TERM`) that print escape sequences as they are."""


def takes_styles(stream: IO[str]) -> bool:
    """Check whether colours, bold and dim may be written to a stream."""
    return takes_movement(stream) and not no_color()


def takes_movement(stream: IO[str]) -> bool:
    """Check whether a stream is a terminal on which a line can be written again."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in DUMB


def no_color() -> bool:
    """Check whether the user asked for no colours (no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))
