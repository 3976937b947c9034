"""Formats of strings that are enforced; the specification leaves every other format to be a remark."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torchwright.serve.grammar.schema.language import Node, lengths
from torchwright.serve.grammar.schema.pattern import whole

_DAY = r"(0[1-9]|1\d|2[0-8])"
_DATE = rf"{{YEAR}}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)"


def _label(most: int) -> str:
    return rf"[a-zA-Z0-9]([a-zA-Z0-9-]{{0,{max(most - 2, 0)}}}[a-zA-Z0-9])?"


_LABEL = _label(32)
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_GROUP = r"[0-9a-fA-F]{1,4}"
_PATH = r"([a-zA-Z0-9._~!$&'()*+,;=:@/-]|%[0-9a-fA-F]{2}){0,200}"
PATTERNS = {
    # Without the 29th of February, which not every year has, and without the year 0.
    "date": _DATE.replace("{YEAR}", r"(000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"),
    "time": _TIME,
    "duration": r"P(\d{1,9}W|\d{1,9}D|(\d{1,9}Y)(\d{1,9}M)?(\d{1,9}D)?|(\d{1,9}M)(\d{1,9}D)?"
    r"|(\d{1,9}D)?T(\d{1,9}H(\d{1,9}M(\d{1,9}S)?)?|\d{1,9}M(\d{1,9}S)?|\d{1,9}S))",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": rf"({_GROUP}:){{7}}{_GROUP}|::|"
    + "|".join(rf"({_GROUP}:){{1,{n}}}(:{_GROUP}){{1,{7 - n}}}" for n in range(1, 7))
    + rf"|({_GROUP}:){{1,7}}:|:(:{_GROUP}){{1,7}}",
    "email": rf"{_ATOM}{{1,32}}(\.{_ATOM}{{1,16}}){{0,2}}@({_LABEL}\.){{1,3}}[a-zA-Z]{{2,10}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]{{0,15}}:(//{_LABEL}(\.{_LABEL}){{0,3}}(:\d{{1,4}})?(/{_PATH})?|[a-zA-Z0-9]{_PATH})"
    rf"(\?{_PATH})?(#{_PATH})?",
}
SHORT_PATTERNS: dict[str, Callable[[int], str]] = {
    "email": lambda part: rf"{_ATOM}{{1,{part}}}@{_label(part)}\.[a-zA-Z]{{2,6}}",
    "hostname": lambda part: rf"{_label(part)}(\.{_label(part)})?",
    "uri": lambda part: "|".join(
        rf"{scheme}://[a-zA-Z0-9][a-zA-Z0-9._~/?&=+,;-]*" for scheme in ("http", "https")
    ),
}
"""The same with parts of at most so many characters, where texts have a bound: counting both is too many states."""
PATTERNS["date-time"] = f"{PATTERNS['date']}[tT]{_TIME}"


@cache
def language(format: str, most: int | None) -> Node | None:
    """Return the language of a format's texts, of which none needs to be longer; None where it is not enforced."""
    pattern = PATTERNS.get(format)
    if pattern is None:
        return None
    found = whole(pattern)
    longest = lengths(found)[1]
    short = SHORT_PATTERNS.get(format)
    if short is None or most is None or (longest is not None and longest <= most):
        return found
    # Two parts and what stands between and after them.
    return whole(short(max(1, min(32, (most - 8) // 2))))
