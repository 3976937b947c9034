"""Escape text of files and models, so that a terminal shows control characters instead of acting on them."""

from __future__ import annotations

import re

ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udc9f\udd00-\udfff]")
"""Controls but tab and line feed, C1 controls, marks that turn the direction of a line, and halves of characters.

U+DCA0 to U+DCFF are bytes of file names that Python could not decode: they are printed as these bytes.
"""


def escaped(text: str) -> str:
    r"""Return text with each character that a terminal acts on as \x1b or \u202e."""
    return ACTING.sub(_visible, text)


def _visible(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()
