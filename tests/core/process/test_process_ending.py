"""A signal ends a command whose main thread does not answer, and nothing unfinished stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import torchwright

PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path
from torchwright.core.process import folders
from torchwright.core.process.files import replacing
from torchwright.core.process import ending
from torchwright.core.process.interrupts import deferred, handled

ending.GRACE_SECONDS = 0.3

def leave(interrupt):
    os.write(1, f"{interrupt}\\n".encode())
    os._exit(interrupt.exit_code)

def busy():
    folder = folders.make(Path(sys.argv[1]), ".out.unfinished-")
    kept = folders.make(Path(sys.argv[1]), ".out.replaced-", scratch=False)
    (folder.path / "half").write_text("x", encoding="utf-8")
    with replacing(Path(sys.argv[1], "table.json")) as beside:
        beside.write_text("{", encoding="utf-8")
        child = subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True)
        print(child.pid, flush=True)
        end = time.monotonic() + 600
        while time.monotonic() < end:  # a conversion that looks at no signal
            pass

with handled(leave=leave), deferred():
    busy()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="descendants are found in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_looks_at_no_signal_is_ended_with_its_children_and_its_folders(
    number: signal.Signals, tmp_path: Path
):
    process, child = started(PROGRAM, tmp_path)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert said == ("interrupted\n" if number == signal.SIGINT else "ended by SIGTERM\n")
    assert [path.name[:13] for path in tmp_path.iterdir()] == [".out.replaced"]
    assert not alive(child)


OTHERS = """
import signal, time
from torchwright.core.process import ending
from torchwright.core.process.interrupts import handled

ending.GRACE_SECONDS = 0.3

with handled(leave=lambda interrupt: None):
    signal.signal(signal.SIGTERM, lambda number, frame: print("a checkpoint first", flush=True))
    print(0, flush=True)
    time.sleep(1)
print("done")
"""


def test_a_handler_that_came_later_takes_its_time(tmp_path: Path):
    process, _ = started(OTHERS, tmp_path)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "a checkpoint first\ndone\n")


FORKED = """
import os, signal, time
from torchwright.core.process import ending
from torchwright.core.process.interrupts import handled

ending.GRACE_SECONDS = 0.3

with handled(leave=lambda interrupt: os._exit(9)):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(read, 1)
    print(0, flush=True)
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
    time.sleep(1)
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_signal_to_a_forked_child_is_not_the_parents(tmp_path: Path):
    process, _ = started(FORKED, tmp_path)
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "done\n")


def started(program: str, folder: Path) -> tuple[subprocess.Popen[str], int]:
    """Start a program, and return it with the number that it prints first."""
    source = str(Path(torchwright.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": source},
        # A test run in the background of a shell ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def alive(pid: int) -> bool:
    """Check whether a process runs; a moment may pass until the system has reaped one."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.1)
    return True


CLOSED = """
import atexit, sys
from torchwright.core.process.interrupts import end_command, handled

atexit.register(print, "python's own end")
with handled(leave=(lambda interrupt: None) if sys.argv[1] == "command" else None):
    print("closed")
    end_command(3)
"""


@pytest.mark.parametrize(("way", "said", "code"), [("command", "closed\n", 3), ("function", None, 0)])
def test_a_command_that_has_closed_all_skips_pythons_own_end(way: str, said: str | None, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", CLOSED, way], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert done.stdout == (said or "closed\npython's own end\n")
