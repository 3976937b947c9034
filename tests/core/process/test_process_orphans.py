"""Processes that end with the one that started them, whatever they do then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a process with its parent")
IMPORTING = """
import os, sys, time
print(os.getpid(), *sys.argv, flush=True)
time.sleep(300)
"""
PARENT = """
import subprocess
from torchwright.core.process.orphans import bound_command
subprocess.Popen(bound_command("importing", "one", "two words")).wait()
"""
WITHIN_S = 60.0


def test_a_module_that_is_still_imported_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "importing.py").write_text(IMPORTING)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid, _, *arguments = parent.stdout.readline().rstrip("\n").split(" ", 3)
        assert arguments == ["one", "two words"]
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    until = time.monotonic() + WITHIN_S
    while runs(int(pid)):
        assert time.monotonic() < until
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_a_module_whose_parent_is_gone_already_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "importing.py").write_text("print('alive')")
    words = [sys.executable, "-m", "torchwright.core.process.orphans", "1", "importing"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
