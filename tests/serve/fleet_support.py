"""`torchwright serve --replicas` in a process of its own, with the real gateway and the bundled model."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_support import MODEL, wait_until

STARTS_WITHIN = 300.0
ROWS = 16
"""Answers of a request that shall take a while: a step of many rows takes milliseconds."""
LONG = 900
"""Tokens of each."""


@dataclass
class RunningFleet:
    """A fleet that takes requests."""

    process: subprocess.Popen[str]
    url: str
    metrics_url: str
    log: Path
    """Standard error: the lines of all children."""
    headers: dict[str, str] = field(default_factory=dict)

    def pids(self, module: str) -> list[int]:
        """Return the fleet's children that run a module, in the order of their start."""
        return children(self.process.pid, module)

    def replicas(self) -> dict[str, int]:
        """Return name and process of each replica that runs."""
        module = "torchwright.serve.fleet.replica_process"
        return {command_line(pid).rpartition(module)[2].strip(): pid for pid in self.pids(module)}

    def place(self, name: str) -> str:
        """Return the URL of a replica's last life."""
        return re.findall(rf"\[{name}\] serving .* at (http://\S+) after", self.log.read_text())[-1]

    def busy(self) -> dict[str, int]:
        """Return those that have requests."""
        return {
            name: pid
            for name, pid in self.replicas().items()
            if httpx.get(self.place(name) + "/load", headers=self.headers).json()["server_load"]
        }

    def gateway(self) -> int:
        (found,) = self.pids("torchwright.serve.fleet.gateway_process")
        return found

    def figures(self) -> str:
        return httpx.get(self.metrics_url, headers=self.headers, timeout=30).text

    def figure(self, name: str, *labels: str) -> float:
        """Return the sum of a figure over the samples that have these labels, as `server="gateway"`."""
        lines = [line for line in self.figures().splitlines() if re.match(rf"{re.escape(name)}\{{", line)]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in labels))

    def routed(self) -> int:
        """Return the number of replicas that the gateway sends requests to."""
        return int(self.figure("smg_worker_health", 'server="gateway"'))

    def complete(self, prompt: str = "def f(", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
        return httpx.post(self.url + "/v1/completions", json=body, headers=self.headers, timeout=120)

    def stream(self, prompt: str = "def f(", **fields: Any) -> Stream:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": LONG,
            "n": ROWS,
            "ignore_eos": True,
            "stream": True,
        }
        return Stream(self.url + "/v1/completions", body | fields, self.headers)


class Stream(threading.Thread):
    """A long streamed answer, read in a thread of its own."""

    def __init__(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self._url, self._body, self._headers = url, body, headers
        self.begun = threading.Event()
        self.status = 0
        self.events: list[str] = []
        self.cut: Exception | None = None
        """The transport's error where the stream ended without its end."""
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", self._url, json=self._body, headers=self._headers, timeout=120
            ) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line.startswith(("data:", "event:")):
                        self.events.append(line)
                        self.begun.set()
        except httpx.HTTPError as error:
            self.cut = error
        finally:
            self.begun.set()

    def done(self) -> Stream:
        """Wait for its end."""
        self.join(120)
        assert not self.is_alive(), "the stream goes on"
        return self

    @property
    def whole(self) -> bool:
        """True if every answer came to its end, and so did the stream."""
        chunks = [json.loads(line[5:]) for line in self.events if line.startswith("data: {")]
        ends = [choice for chunk in chunks for choice in chunk.get("choices", ()) if choice["finish_reason"]]
        return self.cut is None and self.events[-1:] == ["data: [DONE]"] and len(ends) == self._body["n"]


def children(pid: int, module: str = "") -> list[int]:
    """Return the children of a process that run a module, in the order of their start."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in found if module in command_line(int(child))]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    found = children(pid)
    for child in found:  # grows while it is walked
        found += children(child)
    return found


def alive(pid: int) -> bool:
    """Check whether a process runs; a dead one that nobody has waited for does not."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def gone(pids: list[int]) -> None:
    """Wait until none of them runs; one that is just importing notices its parent's death when it has done so."""
    wait_until(lambda: not any(map(alive, pids)), 30)


@contextlib.contextmanager
def fleet(*arguments: str, key: str | None = None, kv: str | None = "64MiB") -> Iterator[RunningFleet]:
    """Start a fleet on free ports and yield it ready; kill it with the block, and check that nothing is left.

    `key` may be several.
    """
    if importlib.util.find_spec("smg") is None:
        pytest.skip("smg is not installed")
    program = "import sys; from torchwright.cli import main; sys.exit(main())"
    words = ["serve", "--port", "0", "--metrics-port", "0", *(["--kv-memory", kv] if kv else []), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-c", program, *words],
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **({"TORCHWRIGHT_API_KEY": key} if key else {})},
            )
        mine: list[int] = []
        try:
            url, metrics_url = _ready(process, log)
            headers = {"Authorization": f"Bearer {key.split()[0]}"} if key else {}
            running = RunningFleet(process, url, metrics_url, log, headers)
            wait_until(lambda: running.routed() > 0, 30)
            yield running
        finally:
            mine = descendants(process.pid)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(30)
            assert process.stdout is not None
            process.stdout.close()
            gone(mine)


def _ready(process: subprocess.Popen[str], log: Path) -> tuple[str, str]:
    assert process.stdout is not None
    killing = threading.Timer(STARTS_WITHIN, process.kill)
    killing.start()
    try:
        for line in process.stdout:
            if match := re.search(r" at (http://\S+) after .* figures at (\S+)$", line):
                return match[1], match[2]
    finally:
        killing.cancel()
    raise AssertionError(f"the fleet ended with {process.wait()}: {log.read_text()[-3000:]}")


def paused(pid: int) -> contextlib.AbstractContextManager[None]:
    """Within the block a process stands still."""

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return block()
