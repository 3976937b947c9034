"""docs/guides/more-machines.md: its commands, as they stand, with both machines on loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

import torchwright

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "more-machines.md"
PORTS = ("8000", "8001", "8002", "29400")
WITHIN_S = 240.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # servers and two torchruns


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with what the guide names: a model, prompts and texts."""
    shutil.copytree(Path(torchwright.__file__).parent / "workloads" / "bundled", tmp_path / "model")
    prompts = [json.dumps({"id": n, "prompt": f"def f{n}("}) for n in range(16)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    (tmp_path / "texts.txt").write_text("".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(400)))
    return tmp_path


@pytest.fixture
def ports() -> dict[str, str]:
    """The guide's ports, and free ones in their places."""
    with ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in PORTS]
        for one in free:
            one.bind(("127.0.0.1", 0))
        return {port: str(one.getsockname()[1]) for port, one in zip(PORTS, free, strict=True)}


def commands(title: str, ports: dict[str, str]) -> list[str]:
    """The commands of a section."""
    section = GUIDE.read_text("utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for block in re.findall(r"```sh\n(.*?)```", section, re.S) for line in block.splitlines()]
    return [re.sub("|".join(ports), lambda found: ports[found[0]], line) for line in lines]


def environment() -> dict[str, str]:
    """The commands of this Python come first on the path."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def running(command: str, here: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=here, env=environment(), start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def answer(command: str, here: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", command], cwd=here, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + WITHIN_S
    while time.monotonic() < until:
        assert process.poll() is None, f"the server of {url} has ended"
        with suppress(OSError):
            if urllib.request.urlopen(f"{url}/ready", timeout=5).status == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"{url} is not ready")


@pytest.mark.skipif(not find_spec("smg"), reason="the extra `fleet` is not installed")
def test_servers_on_two_machines_answer_behind_one_address(here: Path, ports: dict[str, str]) -> None:
    *servers, front, client = commands("Serve from several machines", ports)
    with ExitStack() as stack:
        for server, port in zip(servers, ("8001", "8002"), strict=True):
            wait_ready(f"http://127.0.0.1:{ports[port]}", stack.enter_context(running(server, here)))
        gateway = stack.enter_context(running(front, here))
        wait_ready("http://127.0.0.1:29000", gateway)  # where the fleet's figures lie, by default
        assert json.loads(answer(client, here))["choices"][0]["text"]


def test_two_machines_answer_a_file(here: Path, ports: dict[str, str]) -> None:
    with ExitStack() as stack:
        shards = commands("Answer files on several machines", ports)
        running_shards = [stack.enter_context(running(shard, here)) for shard in shards]
        assert [shard.wait(WITHIN_S) for shard in running_shards] == [0, 0]
    rows = [json.loads(line) for line in (here / "answers.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(16))
    assert all(row["text"] for row in rows)


def test_two_machines_train_and_are_asked(here: Path, ports: dict[str, str]) -> None:
    (train,) = commands("Train on several machines", ports)
    with ExitStack() as stack:
        nodes = [stack.enter_context(running(train, here)) for _ in range(2)]
        assert [node.wait(2 * WITHIN_S) for node in nodes] == [0, 0]
    assert (here / "runs" / "first" / "model" / "model.safetensors").is_file()
    if not find_spec("duckdb"):
        return
    speed, lost = (answer(query, here) for query in commands("Ask what happened", ports))
    assert "tokens_per_s" in speed
    assert "step" in lost
