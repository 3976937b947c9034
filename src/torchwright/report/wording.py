"""Numbers and untrusted text as words.

Three significant digits; GB are 1e9 bytes; `MISSING` where nothing was measured.
"""

from __future__ import annotations

import math
import re

from torchwright.core.records import Interval

MISSING = "–"

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def clean(text: str) -> str:
    """`text` without terminal escapes, control characters and lone surrogates.

    Reasons quote compilers, and names come from users.
    """
    return _CONTROL.sub("", text.replace("\r\n", "\n"))


def elide(text: str, length: int) -> str:
    """`text` on one line of at most `length` characters."""
    line = " ".join(clean(text).split())
    return line if len(line) <= length else line[: max(length - 1, 0)].rstrip() + "…"


def three(value: float) -> str:
    """Three significant digits without an exponent: 0.123, 1.23, 12.3, 1,234."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1 or size == 0:
        return f"{value:.2f}"
    return f"{value:.3g}" if size < 0.001 else f"{value:.3f}"


def number(value: float | None) -> str:
    """Four significant digits, for a metric's own value."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def seconds(value: float | None) -> str:
    """12.3 ms."""
    if value is None or not math.isfinite(value):
        return MISSING
    unit, scale = time_unit(value)
    return f"{three(value / scale)} {unit}"


def rate(name: str, value: float) -> str:
    """By the unit in which the name ends: seconds, or how many a second; a plain number without one."""
    if name.endswith("_per_s"):
        return f"{three(value)}/s"
    return seconds(value) if name.endswith("_s") else number(value)


def rate_name(name: str) -> str:
    """first word, of `first_word_s`."""
    return clean(name.removesuffix("_s").removesuffix("_per").replace("_", " "))


def time_unit(value: float) -> tuple[str, float]:
    """The unit in which `value` seconds reads best, and its length in seconds."""
    size = abs(value)
    if size >= 1 or size == 0:
        return "s", 1.0
    if size >= 1e-3:
        return "ms", 1e-3
    return "µs", 1e-6


def size(value: float | None, *, signed: bool = False) -> str:
    """1.02 GB; with `signed`, +310 MB."""
    if value is None or not math.isfinite(value):
        return MISSING
    sign = ("-" if value < 0 else "+" if value > 0 else "±") if signed else ("-" if value < 0 else "")
    value = abs(value)
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{sign}{three(value / scale)} {unit}"
    return f"{sign}{value:.0f} B"


def percent(fraction: float | None) -> str:
    """0.32%; a loss below nought is a gain and keeps its sign."""
    if fraction is None or not math.isfinite(fraction):
        return MISSING
    text = f"{100 * fraction:.2f}%"
    return "0.00%" if text == "-0.00%" else text


def ratio(value: Interval | float | None) -> str:
    """1.42x."""
    if isinstance(value, Interval):
        value = value.value
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:.2f}x" if abs(value) < 100 else f"{value:,.0f}x"


def bounds(value: Interval | None) -> str:
    """[1.38, 1.47], or nothing."""
    return "" if value is None else f"[{value.low:.2f}, {value.high:.2f}]"


def calls(count: float | None, compile_seconds: float | None) -> str:
    """After how many calls a preparation has paid for itself; None is never, where there was one to pay."""
    if compile_seconds is None:
        return ""
    if count is None or not math.isfinite(count):
        return "never"
    if count < 1:
        return "at once"
    if count < 10_000:
        whole = math.ceil(count)
        return f"{whole:,} call" + ("s" if whole > 1 else "")
    return f"{three(count / 1e3)}k calls" if count < 1e6 else f"{three(count / 1e6)}M calls"
