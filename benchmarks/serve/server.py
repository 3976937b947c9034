"""`torchwright serve` as a process to be measured, and the memory of its processes."""

from __future__ import annotations

import builtins
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.run import children

WORDS = tuple(sorted(name for name in vars(builtins) if name.islower()))
"""Words of random prompts."""
ROLES = {
    "torchwright.serve.engine.process": "engine",
    "torchwright.serve.grammar.worker": "grammars",
    "torchwright.serve.http.read_worker": "reader",
}
"""Module of a server's process → its role."""


@contextmanager
def server(*arguments: str | None) -> Iterator[tuple[str, int]]:
    """Yield URL and process id of `torchwright serve`, once it is ready; without a model it serves the bundled one."""
    words = [each for each in arguments if each]
    command = [sys.executable, "-u", "-m", "torchwright", "serve", "--port", "0", *words]
    with tempfile.TemporaryFile("w+") as log:  # every refused request has its line
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            said = ""
            for line in process.stdout:
                said += line
                if match := re.search(r" at (http://\S+) after ", line):
                    yield match[1], process.pid
                    return
            log.seek(0)
            raise RuntimeError(f"the server ended: {said}{log.read()[-1000:]}")
        finally:
            process.terminate()
            process.wait(60)
            process.stdout.close()


def processes(pid: int) -> dict[str, int]:
    """Return the server's processes by their role."""
    found = {"http": pid}
    for child in children(pid):
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        found |= {role: child for module, role in ROLES.items() if module in words}
    return found


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    assert match is not None, "the process lives"
    return int(match[1]) * 1024 / 1e6


def event(line: str) -> Any:
    """Return the JSON of a stream's data line; None for every other line."""
    return json.loads(line[6:]) if line.startswith("data: {") else None
