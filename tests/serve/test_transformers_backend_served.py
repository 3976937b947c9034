"""A folder without a native family is served from beginning to end: streams, schemas, several answers, its notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_support import command

from folders import causal, save

MESSAGES = [{"role": "user", "content": "ab"}]
SCHEMA = {"enum": ["left", "right"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(causal("Cohere2", sliding_window=8), tmp_path_factory.mktemp("model"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.slow
def test_a_folder_of_another_family_is_served(folder: Path) -> None:
    with command(str(folder)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        (model,) = client.get("/v1/models").json()["data"]
        body: dict[str, Any] = {"model": model["id"], "messages": MESSAGES, "temperature": 0, "max_tokens": 6}
        whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        streamed = ""
        with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        streamed += choice["delta"].get("content") or ""
        assert streamed == whole
        several = client.post("/v1/chat/completions", json=body | {"n": 3}).json()["choices"]
        assert [choice["message"]["content"] for choice in several] == [whole] * 3
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        wanted = body | {"response_format": form, "max_tokens": 40}
        answer = client.post("/v1/chat/completions", json=wanted).json()["choices"][0]["message"]["content"]
        assert json.loads(answer) in SCHEMA["enum"]
        again = client.post(
            "/v1/completions", json={"model": model["id"], "prompt": "x" * 40, "max_tokens": 1}
        )
        again = client.post(
            "/v1/completions", json={"model": model["id"], "prompt": "x" * 40, "max_tokens": 1}
        )
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
