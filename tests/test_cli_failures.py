"""Faults of the system as words and exit codes."""

from __future__ import annotations

import errno
import json
import os

import pytest

from torchwright.cli.failures import exit_code


def failing(number: int, name: str | None) -> int:
    def run(words: list[str]) -> int:
        raise OSError(number, os.strerror(number), name)

    return exit_code(run, ["bench", "--json"])


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EACCES, "Refused"),
        (errno.EROFS, "Refused"),
        (errno.ENAMETOOLONG, "Refused"),
        (errno.ELOOP, "Refused"),
        (errno.ENOSPC, "DiskFull"),
    ],
)
def test_what_the_system_refuses_is_told_in_words(
    number: int, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(number, "/some/where\x1b]0;x\x07") == 2
    out, err = capsys.readouterr()
    assert err.startswith("torchwright: ")
    assert os.strerror(number) in err
    assert "Traceback" not in err
    assert "\x1b" not in err
    assert json.loads(out)["error"]["type"] == kind


def test_any_other_fault_has_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(errno.EBADF, "file") == 1
    assert "Traceback" in capsys.readouterr().err
