"""`torchwright serve --wait-ready`: a script's server, there when the command ends, and gone when it is told to go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from http_support import MODEL, wait_until

PROGRAM = "import sys; from torchwright.cli import main; sys.exit(main())"


def serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", PROGRAM, "serve", "--wait-ready", "--port", "0", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=os.environ | environment)


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


@pytest.mark.slow
def test_a_server_that_cannot_load_fails_the_command() -> None:
    ended = serve("--kv-memory", "1KiB")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "1024 bytes for keys and values" in ended.stderr


@pytest.mark.slow
def test_a_long_path_for_temporary_files_keeps_no_server_from_being_ready(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    ended = serve(TMPDIR=str(long))
    assert (ended.returncode, ended.stderr) == (0, "")
    url, pid = ended.stdout.split()
    try:
        assert httpx.get(url + "/health").status_code == 200
    finally:
        os.kill(int(pid), signal.SIGTERM)
    wait_until(lambda: not _accepts(url))


def test_an_engine_that_ends_at_its_start_fails_the_command_with_the_reason(tmp_path: Path) -> None:
    """The engine's process ends before any code of the engine's runs, and is not started again."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'torchwright.serve.engine.process' in sys.orig_argv:\n"
        "    os.write(2, b'no memory for torch\\n')\n"
        "    os._exit(1)\n"
    )
    ended = serve(PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "the engine ended before it was ready (exit code 1)" in ended.stderr
    assert ended.stderr.count("no memory for torch") == 1
