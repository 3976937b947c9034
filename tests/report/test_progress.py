"""The progress of rows: a bar on a terminal, and nothing but notices elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from torchwright.report.progress import RowProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, *, quiet: bool = False) -> str:
    """Return what standard error is given by a run of three parts, the first of which was there."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with RowProgress(quiet=quiet) as progress:
        progress.begin(300)
        progress.say("a notice\x1b[2J")
        progress.advance(bytes_read=100, rows=10, rejected=0, there=True)
        progress.advance(bytes_read=100, rows=10, rejected=3, there=False)
        progress.advance(bytes_read=100, rows=10, rejected=0, there=False)
        progress._bar.refresh()
    return stream.getvalue()


def test_a_terminal_sees_rows_and_their_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal())
    assert "30 rows" in text
    assert "rows/s, 3 rejected" in text
    assert "100%" in text


@pytest.mark.parametrize("quiet", [True, False])
def test_a_pipe_gets_notices_alone(monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    assert shown(monkeypatch, io.StringIO(), quiet=quiet) == "a notice\\x1b[2J\n"


def test_an_input_of_unknown_size_has_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with RowProgress(quiet=False) as progress:
        progress.begin(None)
        progress.advance(bytes_read=0, rows=10, rejected=0, there=True)
        assert progress._bar.tasks[0].total is None
