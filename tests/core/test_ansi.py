"""Escape sequences on a terminal: none for styles with NO_COLOR, none at all where the terminal is dumb."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import torchwright
from torchwright.core.ansi import takes_movement, takes_styles
from torchwright.report.console import SafeConsole, moves
from torchwright.report.terminal import LiveProgress

STYLE = re.compile(r"\x1b\[[0-9;:]*m")
SOURCE = Path(torchwright.__file__).parent
WRITTEN_OUT = re.compile(r"\\x1b\[|\\033\[|\\u001b\[|(?<!Safe)\bConsole\(")
"""Escape sequences in a source file, and rich's own console in place of ours."""


@contextmanager
def terminal() -> Iterator[tuple[TextIO, int]]:
    """A pseudo-terminal: the stream of a program, and the descriptor that shows what was written."""
    shown, own = os.openpty()
    with os.fdopen(own, "w", encoding="utf-8") as stream:
        yield stream, shown
    os.close(shown)


def read(shown: int) -> str:
    text = b""
    while select.select([shown], [], [], 0)[0]:
        text += os.read(shown, 65536)
    return text.decode()


def styled(stream: TextIO) -> None:
    """Print styles of every kind, and a live table."""
    console = SafeConsole(file=stream)
    table = Table("name", title="title", header_style="bold magenta")
    table.add_row(Text("a", "dim cyan"), ProgressBar(total=3, completed=1))
    console.print(table, style="on blue")
    console.print("12 [red]red[/red]", style="bold")
    with LiveProgress(console=console):
        pass


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_a_terminal_has_styles_and_moves() -> None:
    with terminal() as (stream, shown):
        styled(stream)
        stream.flush()
        assert STYLE.search(read(shown))
        assert takes_styles(stream)
        assert takes_movement(stream)
        assert moves(SafeConsole(file=stream))


def test_no_color_leaves_only_movement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal() as (stream, shown):
        styled(stream)
        stream.flush()
        text = read(shown)
        assert "\x1b[?25l" in text, "the live table hides the cursor"
        assert not STYLE.search(text)
        assert not takes_styles(stream)
        assert takes_movement(stream)


def test_an_empty_no_color_is_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    with terminal() as (stream, _):
        assert takes_styles(stream)


@pytest.mark.parametrize("kind", ["dumb", "unknown"])
def test_a_dumb_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("TERM", kind)
    with terminal() as (stream, shown):
        styled(stream)
        stream.flush()
        assert "\x1b" not in read(shown)
        assert not takes_movement(stream)
        assert not takes_styles(stream)


def test_a_pipe_takes_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with open(os.devnull, "w") as stream:
        assert not moves(SafeConsole(file=stream))
        assert not takes_styles(stream)


def test_a_verb_under_no_color_writes_plain_text() -> None:
    shown, own = os.openpty()
    environment = {**os.environ, "NO_COLOR": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "torchwright", "techniques"], stdout=own, stderr=own, env=environment
    ) as process:
        os.close(own)
        text = b""
        while True:
            try:
                piece = os.read(shown, 65536)
            except OSError:  # as Linux reports the end
                break
            if not piece:
                break
            text += piece
    os.close(shown)
    assert process.returncode == 0
    assert b"compile" in text
    assert b"\x1b" not in text


def test_only_two_files_know_escape_sequences() -> None:
    found = [
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if WRITTEN_OUT.search(file.read_text(encoding="utf-8"))
    ]
    assert set(found) <= {"core/ansi.py"}, f"not through torchwright.core.ansi or SafeConsole: {found}"
