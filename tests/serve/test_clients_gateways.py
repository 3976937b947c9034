"""Gateways in front of the real server: SMG and litellm's proxy know what stands behind them, and pass on what it can.

Neither is among the test requirements, because they hold other packages back: `pip install 'torchwright[gateways]'`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from http_support import MODEL, Command, command

KEY = f"sk-{secrets.token_hex(32)}"
"""The server's and the gateways'; litellm's takes no weak one."""
TALK: Any = [{"role": "user", "content": "Sort a list of numbers."}]
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
TOOLS: Any = [{"type": "function", "function": {"name": "answer", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def server() -> Iterator[Command]:
    if not any(map(importlib.util.find_spec, ("smg", "litellm"))):
        pytest.skip("neither smg nor litellm is installed")
    with command("--api-key", KEY) as running:
        yield running


@contextlib.contextmanager
def gateway(package: str, path: str, *words: str, log: Path) -> Iterator[str]:
    """A gateway's URL once its `path` says 200; `{port}` in its words is a free one."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    port = free_port()
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *(word.format(port=port) for word in words)],
            stdout=out,
            stderr=out,
            env=environment,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url + path, process, log)
        yield url
    finally:
        process.kill()
        process.wait(30)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"the gateway is not ready: {log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def smg(server: Command, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("smg") / "log"
    words = f"-m smg launch --host 127.0.0.1 --port {{port}} --worker-urls {server.url} --api-key {KEY}"
    with gateway("smg", "/readiness", *words.split(), "--prometheus-port", str(free_port()), log=log) as url:
        yield url


@pytest.fixture(scope="module")
def litellm(server: Command, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("litellm")
    ways = {"hosted_vllm": server.url + "/v1", "openai": server.url + "/v1", "anthropic": server.url}
    models = [
        {
            "model_name": way,
            "litellm_params": {"model": f"{way}/{MODEL}", "api_base": base, "api_key": KEY},
        }
        for way, base in ways.items()
    ]
    (folder / "config.json").write_text(json.dumps({"model_list": models}))  # JSON is YAML
    run = "import sys; from litellm import run_server; sys.argv[0] = 'litellm'; run_server()"
    words = ["-c", run, "--host", "127.0.0.1", "--port", "{port}", "--config", str(folder / "config.json")]
    with gateway("litellm", "/health/readiness", *words, log=folder / "log") as url:
        yield url


def check_chat(url: str, model: str) -> None:
    """What a client of OpenAI's gets through a gateway."""
    with openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        fields: Any = {"model": model, "messages": TALK, "temperature": 0}
        whole = client.chat.completions.create(**fields, max_tokens=12)
        chunks = list(client.chat.completions.create(**fields, max_tokens=12, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert whole.choices[0].message.content == text != ""
        called = client.chat.completions.create(**fields, max_tokens=64, tools=TOOLS, tool_choice="required")
        (call, *_) = called.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert json.loads(call.function.arguments).keys() == {"ok"}


def test_smg_knows_what_stands_behind_it(smg: str, server: Command) -> None:
    (worker,) = httpx.get(smg + "/workers", headers={"Authorization": f"Bearer {KEY}"}).json()["workers"]
    assert (worker["runtime_type"], worker["status"]) == ("vllm", "ready")
    (model,) = worker["models"]
    assert (model["id"], model["context_length"]) == (MODEL, 1024)
    assert worker["labels"]["model_path"].endswith("bundled")


def test_smg_passes_on_chats(smg: str) -> None:
    check_chat(smg, MODEL)


def test_smg_passes_on_messages(smg: str) -> None:
    body = {"model": MODEL, "max_tokens": 8, "messages": TALK}
    headers = {"Authorization": f"Bearer {KEY}"}
    found = httpx.post(smg + "/v1/messages", json=body, headers=headers, timeout=60).json()
    assert (found["type"], found["stop_reason"]) == ("message", "max_tokens")


@pytest.mark.parametrize("way", ["hosted_vllm", "openai", "anthropic"])
def test_litellm_passes_on_chats(litellm: str, way: str) -> None:
    check_chat(litellm, way)


@pytest.mark.parametrize("way", ["hosted_vllm", "anthropic"])
def test_litellm_passes_on_messages(litellm: str, way: str) -> None:
    body = {"model": way, "max_tokens": 8, "messages": TALK}
    headers = {"Authorization": f"Bearer {KEY}"}
    response = httpx.post(litellm + "/v1/messages", json=body, headers=headers, timeout=60)
    assert response.json()["stop_reason"] == "max_tokens"
