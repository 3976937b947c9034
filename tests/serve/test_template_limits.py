"""The server never parses or renders a model's own chat template in the process that answers."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from torchwright.hub.chat_template import ChatTemplate
from torchwright.serve.api_error import ApiError
from torchwright.serve.folder import find
from torchwright.serve.http.fetching import PictureFetcher
from torchwright.serve.http.read_worker import load
from torchwright.serve.limits import Limits
from torchwright.serve.openai.language import load_language
from torchwright.serve.openai.protocol import ChatRequest
from torchwright.serve.openai.reading import RENDER, BodyReader, Read, ReadingJob
from torchwright.serve.openai.request_limits import RequestLimits

LIMITS = Limits(read_seconds=0.5, read_memory_bytes=200 * 2**20)
NESTED = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"


def asked(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Ask for two chats by a template, of a reader whose own process may not parse; return prompts or errors."""
    bundled = find(None).folder
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled / name, folder / name)
    (folder / "chat_template.jinja").write_text(source)
    monkeypatch.setattr(ChatTemplate, "parse", lambda self: pytest.fail("parsed in the server"))
    language = load_language(folder)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()

    async def run() -> list[Any]:
        reader = BodyReader(folder, LIMITS, tokenizes=True, fetch=PictureFetcher((), LIMITS).fetched)
        assert not reader.reads_here(ChatRequest, body, language)
        try:
            asking = [
                reader.generating(ChatRequest, body, language, RequestLimits(("m",), 512, 512))
                for _ in range(2)
            ]
            return await asyncio.gather(*asking, return_exceptions=True)
        finally:
            await reader.workers.close()

    return asyncio.run(run())


@pytest.mark.slow  # `test_reading` answers conversations that are read apart
def test_a_template_is_rendered_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _, prompts in asked(tmp_path, "{{ messages[0].content }}!", monkeypatch):
        [ids] = prompts.items
        assert load_language(tmp_path).tokenizer.decode(ids) == "hi!"


@pytest.mark.plain("time", "memory")
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n{{ 1 / 0 }}", "line 2: ZeroDivisionError"),
        (NESTED, "0.5 s of processor time"),
        ("{{ 'a' | center(3000000000) }}", "cannot take these messages"),
        ("{% if %}", "cannot be parsed"),
    ],
    ids=["fault", "time", "memory", "syntax"],
)
def test_a_bomb_is_a_400(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str) -> None:
    for error in asked(tmp_path, source, monkeypatch):
        assert isinstance(error, ApiError)
        assert error.status == 400
        assert words in error.message


def test_variables_of_a_template_are_left_with_who_renders_it(tmp_path: Path) -> None:
    """Half a million of them, parsed again by the process that answers, held it for two seconds."""
    read = load(str(tmp_path), False, 1 << 20, 1 << 20)
    asked = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"name": "value"}}
    job = ReadingJob("ClassifyRequest", json.dumps(asked).encode(), None)
    found = msgspec.msgpack.decode(read(msgspec.msgpack.encode(job)), type=Read)
    assert json.loads(found.body).keys() == {"messages"}
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }} {{ name }}")
    read = load(str(tmp_path), False, 1 << 20, 1 << 20)
    job = ReadingJob(RENDER, json.dumps(asked).encode(), None)
    assert msgspec.msgpack.decode(read(msgspec.msgpack.encode(job)), type=Read).body == b"hi value"
