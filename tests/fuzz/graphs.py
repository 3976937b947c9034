"""Forged graphs of OpenVINO's and ONNX Runtime's, each opened in a process of its own."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import media
import onnx_files

DONE, REFUSED, WRONG = 0, 10, 11
NUMBERS = (b"0", b"-1", b"1", b"7", b"4294967296", b"9223372036854775807", b"1e9", b"x", b"")


def break_graph(folder: Path, chance: random.Random) -> str:
    """Change one of the graph's files below a folder; return the change in words."""
    files = sorted(
        path for path in folder.rglob("*") if path.suffix in (".xml", ".bin") or onnx_files.is_onnx(path)
    )
    path = chance.choice(files)
    data, what = path.read_bytes(), "bytes"
    if onnx_files.is_onnx(path) and chance.random() < 0.8:
        data, what = onnx_files.break_model(data, chance)
    elif path.suffix == ".xml" and chance.random() < 0.8:
        places = list(re.finditer(rb'(?<=")[\w.,-]*(?=")', data))
        for place in sorted(chance.sample(places, chance.choice((1, 1, 2))), key=lambda one: -one.start()):
            other = chance.choice((*NUMBERS, chance.choice(places)[0]))
            data = data[: place.start()] + other + data[place.end() :]
        what = "attributes"
    else:
        data = media.break_bytes(data, chance)
    path.write_bytes(data)
    return what


def limit_memory(more: int) -> None:
    """Let this process take this many bytes more than it has: a forged graph may ask for any number."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGESIZE") + more
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def in_child(call: Callable[[], None], seconds: float) -> tuple[int, str]:
    """Run a call in a forked child; return its exit code, or minus the signal that ended it, and what it said."""
    from torchwright.core.errors import TorchwrightError

    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        code, said = DONE, ""
        try:
            call()
        except TorchwrightError as error:
            code, said = REFUSED, str(error)
        except BaseException:
            code, said = WRONG, traceback.format_exc()
        os.write(tell, said.encode(errors="replace")[-4000:])
        os._exit(code)
    os.close(tell)
    status = _wait(child, seconds)
    with os.fdopen(hear, "rb") as file:
        return status, file.read().decode(errors="replace")


def _wait(child: int, seconds: float) -> int:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGALRM
