"""Open files: the soft limit is raised, and clients get what the process itself does not need."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from torchwright.serve.descriptors import RESERVE, TICKS, fitting, raise_limit
from torchwright.serve.limits import Limits

FILES = 256
SERVER = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES // 2}, {FILES}))
from http_support import serving
from torchwright.serve.descriptors import fitting, raise_limit
from torchwright.serve.limits import Limits
from torchwright.serve.log import begin_log
begin_log()
with serving(limits=fitting(Limits(), raise_limit())) as running:
    print(running.url, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("files", [256, 1024, 4096, 65_536])
def test_connections_leave_room_for_the_server(files: int) -> None:
    limits = fitting(Limits(), files)
    assert limits.connections + TICKS * limits.accepted_at_once + RESERVE <= files
    assert limits.connections >= files // 3 or limits.connections == Limits().connections


def test_the_soft_limit_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, soft), hard))
        assert raise_limit() > 200
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def server(log: Path) -> Iterator[str]:
    """A server with a fake engine that may open few files; its log goes to a file."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=Path(__file__).parent,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().decode().strip()
        finally:
            process.stdin.close()
            process.wait(60)
            process.stdout.close()


def test_more_connections_than_files_are_refused_in_words(tmp_path: Path) -> None:
    with server(tmp_path / "log") as url, httpx.Client(base_url=url, timeout=30) as client:
        assert client.get("/health").status_code == 200
        host, port = url.removeprefix("http://").split(":")
        idle = [socket.create_connection((host, int(port)), 30) for _ in range(2 * FILES)]
        try:
            answers = [connection.recv(4096) for connection in idle[FILES:]]
            assert all(b" 503 " in answer for answer in answers)
            assert client.get("/health").status_code == 200  # by the connection that was open before
        finally:
            for connection in idle:
                connection.close()
        assert client.get("/health").status_code == 200
    said = (tmp_path / "log").read_text()
    assert "connections are open" in said
    assert "Traceback" not in said
    assert len(said.splitlines()) < 20
