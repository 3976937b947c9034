"""Completions of a SentencePiece tokenizer: an answer keeps the space of its first word, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_support import serving
from tokenizer_support import save

from torchwright.serve.http.server import NO_TEMPLATE, Server

# The fake engine answers with the prompt's own tokens from the second on, over and over.
PROMPT = "Hello world"
ANSWER = " Hello world Hello"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sentencepiece")
    save("sentencepiece", made)
    (made / "additional_chat_templates").mkdir()
    for name, text in (("default", "Hello world"), ("tool_use", "world {{ tools[0].function.name }}")):
        (made / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    return made


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[httpx.Client]:
    with serving(folder=folder) as running, httpx.Client(base_url=running.url, timeout=30) as client:
        yield client


def complete(http: httpx.Client, **options: Any) -> dict[str, Any]:
    """One choice; streamed, its pieces together are the same text."""
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, **options}
    [choice] = http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    if not (options.get("echo") and options.get("logprobs") is not None):
        lines = http.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    return choice


def test_an_answer_begins_with_the_space_of_its_first_word(http: httpx.Client) -> None:
    assert complete(http)["text"] == ANSWER
    assert complete(http, echo=True)["text"] == PROMPT + ANSWER


def test_a_stop_text_is_found_at_the_first_word(http: httpx.Client) -> None:
    found = complete(http, stop=" Hello")
    assert (found["text"], found["stop_reason"]) == ("", " Hello")
    assert complete(http, stop=" world H")["text"] == " Hello"


def test_tokens_that_are_scored_begin_where_the_text_has_them(http: httpx.Client) -> None:
    scores = complete(http, logprobs=0)["logprobs"]
    assert scores["tokens"] == [" Hello", " world", " Hello"]
    assert scores["text_offset"] == [0, 6, 12]
    echoed = complete(http, logprobs=0, echo=True)
    assert echoed["text"] == PROMPT + ANSWER
    assert echoed["logprobs"]["text_offset"] == [0, 0, 5, 11, 17, 23]


def test_a_prompt_of_token_ids_may_end_inside_of_a_character(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "😀a", "add_special_tokens": False}).json()["tokens"]
    marker, first, second, third, last, letter = ids
    # The fake engine goes on with the second token, which is the last byte that the emoji wants.
    prompt = [marker, last, letter, first, second, third]
    assert complete(http, prompt=prompt, max_tokens=1)["text"] == "😀"
    assert complete(http, prompt=prompt, max_tokens=1, echo=True)["text"] == "\ufffda😀"


def test_the_answer_of_a_conversation_is_a_text_of_its_own(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert answer["choices"][0]["message"]["content"] == "world world"


def test_tools_are_rendered_by_the_additional_template_for_them(http: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "again"}}]
    body = {"messages": [{"role": "user", "content": "x"}]}
    plain = http.post("/tokenize", json=body).raise_for_status().json()["tokens"]
    used = http.post("/tokenize", json={**body, "tools": tools}).raise_for_status().json()["tokens"]
    expected = [
        http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        for text in ("Hello world", "world again")
    ]
    assert [plain, used] == expected


def test_a_folder_says_which_templates_it_has_or_that_it_has_none(http: httpx.Client, tmp_path: Path) -> None:
    [card] = http.get("/v1/models").json()["data"]
    assert card["chat_template"] == ["default", "tool_use"]
    save("byte level", tmp_path)
    with serving(folder=tmp_path) as running:
        [card] = httpx.get(f"{running.url}/v1/models").json()["data"]
        assert card["chat_template"] == []
        server = Server(running.service, running.url, 0.0, print, warm=False)
        assert f"notice: {NO_TEMPLATE}" in server._ready_text()  # pyright: ignore[reportPrivateUsage]
