"""`torchwright serve --wait-ready`: a script's server, there when the command ends, and gone when it is told to go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import httpx
from http_support import MODEL, wait_until

PROGRAM = "import sys; from torchwright.cli import main; sys.exit(main())"


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", PROGRAM, "serve", "--wait-ready", "--port", "0", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_the_command_ends_when_requests_are_taken() -> None:
    ended = serve()
    url, pid = ended.stdout.split()  # and nothing else, so that `read url pid` has them
    try:
        assert (ended.returncode, ended.stderr) == (0, "")
        answer = httpx.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60)
        assert answer.json()["model"] == MODEL
        assert os.getsid(int(pid)) == int(pid)  # no hang-up of the script's terminal ends it
    finally:
        os.kill(int(pid), signal.SIGTERM)
    wait_until(lambda: not _accepts(url))


def _accepts(url: str) -> bool:
    try:
        httpx.get(url + "/health")
        return True
    except httpx.TransportError:
        return False


def test_a_server_that_cannot_load_fails_the_command() -> None:
    ended = serve("--kv-memory", "1KiB")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "1024 bytes for keys and values" in ended.stderr
