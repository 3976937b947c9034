"""docs/use-from.md: each block of Python runs against a server, and configurations name what the server answers."""

from __future__ import annotations

import ast
import configparser
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import yaml
from http_support import Running, serving

PAGE = (Path(__file__).parents[2] / "docs" / "use-from.md").read_text("utf-8")
BLOCKS = {
    title: (language, text)
    for title, language, text in re.findall(
        r"^##+ ([^\n]+)\n(?:(?!#)[^\n]*\n)*?```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
    )
}
"""Heading → the language and the text of its first block."""
OPENAI, ANTHROPIC = "http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"
PYTHON = {title: text for title, (language, text) in BLOCKS.items() if language == "python"}
QUESTION = "Hello"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(aliases=["local"]) as found:
        yield found


def environment(title: str) -> str:
    """The Python that has a block's packages: this one, or that of TORCHWRIGHT_CLIENTS_PYTHON."""
    imported = [
        node for node in ast.walk(ast.parse(PYTHON[title])) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = [
        node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imported
    ]
    missing = [name for name in (name.partition(".")[0] for name in names) if find_spec(name) is None]
    if not missing:
        return sys.executable
    other = os.environ.get("TORCHWRIGHT_CLIENTS_PYTHON")
    if other is None:
        pytest.skip(
            f"{missing[0]} is not installed: TORCHWRIGHT_CLIENTS_PYTHON=PATH names a Python that has it"
        )
    return other


def test_the_page_has_a_block_for_every_client() -> None:
    named = {"OpenAI's SDK", "Anthropic's SDK", "openai-agents", "LangChain", "LlamaIndex", "litellm"}
    assert PYTHON.keys() == named
    assert BLOCKS.keys() >= {
        "Claude Code",
        "Codex",
        "Continue",
        "Cline",
        "aider",
        "Open WebUI",
        "From a container",
    }


@pytest.mark.slow  # `test_clients` uses OpenAI's SDK in this process
@pytest.mark.parametrize("title", PYTHON)
def test_a_block_of_python_prints_an_answer(title: str, running: Running) -> None:
    python = environment(title)
    program = PYTHON[title].replace("http://127.0.0.1:8000", running.url)
    known = {**os.environ, "PYTHONPATH": "", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=120, env=known)
    assert done.returncode == 0, done.stderr[-2000:]
    # The fake engine repeats the prompt, up to where the user would speak: instructions stand before the question.
    assert ("Be brief." if title == "openai-agents" else QUESTION) in done.stdout


def variables(title: str) -> dict[str, str]:
    return dict(re.findall(r"^export (\w+)=(\S+)$", BLOCKS[title][1], re.MULTILINE))


def test_agents_configurations_name_the_server() -> None:
    claude = variables("Claude Code")
    assert claude["ANTHROPIC_BASE_URL"] == ANTHROPIC
    assert {claude["ANTHROPIC_MODEL"], claude["ANTHROPIC_DEFAULT_HAIKU_MODEL"]} == {"local"}

    codex = tomllib.loads(BLOCKS["Codex"][1])
    provider = codex["model_providers"][codex["model_provider"]]
    assert (codex["model"], provider["base_url"], provider["wire_api"]) == ("local", OPENAI, "responses")

    continued = yaml.safe_load(BLOCKS["Continue"][1])
    assert {"name", "version", "schema", "models"} == continued.keys()
    (model,) = continued["models"]
    assert (model["provider"], model["model"], model["apiBase"]) == ("openai", "local", OPENAI)

    cline = configparser.ConfigParser()
    cline.optionxform = str  # type: ignore[assignment, method-assign]
    cline.read_string("[cline]\n" + BLOCKS["Cline"][1])
    assert cline["cline"]["Base URL"] == OPENAI
    assert cline["cline"]["Model ID"] == "local"

    aider = variables("aider")
    assert aider["OPENAI_API_BASE"] == OPENAI
    assert "--model openai/local" in BLOCKS["aider"][1]
    assert variables("Open WebUI")["OPENAI_API_BASE_URL"] == OPENAI


def test_the_paths_that_the_clients_ask_for_are_served(running: Running) -> None:
    body = {"model": "local", "max_tokens": 3, "messages": [{"role": "user", "content": QUESTION}]}
    with httpx.Client(base_url=running.url, timeout=60) as http:
        assert "local" in [model["id"] for model in http.get("/v1/models").json()["data"]]
        for path in ("/v1/chat/completions", "/v1/messages"):
            assert http.post(path, json=body).status_code == 200
        asked = {"model": "local", "max_output_tokens": 3, "input": QUESTION}
        assert http.post("/v1/responses", json=asked).status_code == 200


def test_a_container_is_answered_under_the_name_of_its_host() -> None:
    flags = re.search(r"--allowed-host (\S+)", BLOCKS["From a container"][1])
    assert flags is not None
    headers = {"host": f"{flags[1]}:8000"}
    with serving() as closed:
        refused = httpx.get(f"{closed.url}/v1/models", headers=headers, timeout=60)
    assert refused.status_code == 403
    assert f"--allowed-host {flags[1]}" in refused.json()["error"]["message"]
    with serving(hosts=[flags[1]]) as opened:
        assert httpx.get(f"{opened.url}/v1/models", headers=headers, timeout=60).status_code == 200
