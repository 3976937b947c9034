"""packages/sim: `torchwright serve --device sim` from end to end, against the same server on the CPU."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from sim_support import install, run

pytestmark = pytest.mark.slow  # two servers
SERVE = ["-m", "torchwright", "serve", "--wait-ready", "--port", "0", "--dtype", "fp32", "--no-deterministic"]
ASKED: list[dict[str, Any]] = [
    {"prompt": "The river", "max_tokens": 12, "temperature": 0},
    {"prompt": ["One two", "A house"], "max_tokens": 6, "temperature": 0.9, "top_p": 0.9, "seed": 3},
    {"prompt": "In the morning", "max_tokens": 6, "temperature": 0, "logprobs": 2, "echo": True},
]


def answers(installed: dict[str, str], device: str) -> list[list[str]]:
    """Return the answers of a server on this device to `ASKED`; the process of the device ends with the server."""
    url, pid = run(installed, *SERVE, "--device", device).stdout.split()
    try:
        found = []
        for asked in ASKED:
            data = json.dumps(asked).encode()
            request = Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
            with urlopen(request, timeout=240) as answer:
                found.append([choice["text"] for choice in json.load(answer)["choices"]])
        return found
    finally:
        os.kill(int(pid), signal.SIGTERM)


def test_a_server_on_a_device_answers_as_one_on_the_cpu(tmp_path: Path) -> None:
    """In float32: tokens are equal where the order of sums changes no choice, as here."""
    installed = install(tmp_path)
    assert answers(installed, "sim") == answers(installed, "cpu")


def test_without_kernels_there_is_no_promise(tmp_path: Path) -> None:
    told = run(install(tmp_path), *SERVE[:-1], "--device", "sim", check=False)
    assert told.returncode == 2
    assert "--no-deterministic serves it without that promise" in " ".join(told.stderr.split())
