"""Public reports of other servers about pictures over their APIs, sent to ours."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_support import Running, error, serving
from picture_support import PLACE, TOKEN, part, picture, text, url, user, write_folder

SQUARES = base64.b64encode(picture(8, 8, mode="1")).decode().rstrip("=")
"""A picture of eight pixels and one bit, without the padding of base64."""
PNG = picture(56, 56)
DATA = base64.b64encode(PNG).decode()
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"tag": "<|image_pad|>"}'}}
OUTPUT = {
    "type": "function_call_output",
    "call_id": "c1",
    "output": [{"type": "input_image", "image_url": url(PNG)}],
}


def chat(*messages: dict[str, Any], **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": list(messages), "max_tokens": 1, **more}


def anthropic(source: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    message = {"role": "user", "content": [{"type": "image", "source": source}]}
    return "/v1/messages", {"messages": [message], "max_tokens": 1}


def responses(*items: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": list(items), "max_output_tokens": 1}


ANSWERED: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm-project/vllm#57740: a place's word in a text": chat(user("a <|image_pad|> b", part(PNG))),
    "huggingface/transformers#47217: a place's word in a text": chat(
        user(f"How do I write {PLACE}?", part(PNG))
    ),
    "sgl-project/sglang#37579: in history, thoughts, calls and results": chat(
        user(part(PNG)),
        {
            "role": "assistant",
            "content": "<|image_pad|>",
            "reasoning_content": "<|image_pad|>",
            "tool_calls": [CALL],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "<|image_pad|>"},
        user("And?"),
    ),
    "vllm-project/vllm#43203: a tool's picture": chat(
        user("x"),
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [part(PNG)]},
    ),
    "ggml-org/llama.cpp#23542: a function's output in Responses": responses(
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}, OUTPUT
    ),
    "vllm-project/vllm-ascend#6938: Anthropic's base64": anthropic(
        {"type": "base64", "media_type": "image/png", "data": DATA}
    ),
    "vllm-project/vllm-ascend#6938: Anthropic's URL that is a data URL": anthropic(
        {"type": "url", "url": url(PNG)}
    ),
    "matatonic/openedai-vision#4: base64 without padding": chat(
        user(part(f"data:image/png;base64,{SQUARES}"))
    ),
    "ggml-org/llama.cpp#14615: WebP": chat(user(part(url(picture(form="WEBP"), "image/webp")))),
    "vllm-project/vllm#15080: sides below a patch": chat(user(part(picture(26, 28)))),
    "ollama/ollama#11297: sides below a patch": chat(user(part(picture(257, 27)))),
    "BerriAI/litellm#4738: pictures in several messages": chat(
        user("a"), {"role": "assistant", "content": [text("b")]}, user("c", part(PNG)), user(part(PNG))
    ),
}
REFUSED: dict[str, tuple[tuple[str, dict[str, Any]], str]] = {
    "ollama/ollama#7247: base64 alone": (
        chat(user(part(DATA))),
        "data:image/png;base64,… or http(s) is taken",
    ),
    "ollama/ollama#6753: a URL that is not fetched": (
        chat(user(part("http://images.cocodataset.org/val2017/000000039769.jpg"))),
        "start the server with --allow-url images.cocodataset.org",
    ),
    "vllm-project/vllm#57157: a cloud's keys": (
        chat(user(part("http://169.254.169.254/latest/meta-data/"))),
        "'169.254.169.254' is not allowed",
    ),
    "xorbitsai/inference#5533: a local file": (chat(user(part("file:///etc/passwd"))), "http(s) is taken"),
    "jundot/omlx#3529: sides of more than 1 to 200": (
        chat(user(part(picture(1700, 8))), stream=True),
        "the model's processor cannot take the picture",
    ),
    "vllm-project/vllm#9141: one pixel high": (chat(user(part(picture(56, 1)))), "56x1 pixels"),
    "vllm-project/vllm#28123: a file that is none": (
        chat(user(part(url(b"not a picture")))),
        "no picture that can be read",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with serving(folder=folder) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("report", ANSWERED)
def test_a_request_that_failed_elsewhere_is_answered(http: httpx.Client, report: str) -> None:
    path, body = ANSWERED[report]
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text


@pytest.mark.slow
@pytest.mark.parametrize("report", REFUSED)
def test_a_request_that_cannot_be_answered_is_refused_in_words(http: httpx.Client, report: str) -> None:
    (path, body), words = REFUSED[report]
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert words in error(response)["message"]


def test_a_text_models_system_message_with_a_picture_is_refused() -> None:
    """vllm-project/vllm#33925: a model of text answered as if it had read the picture."""
    with serving() as running:
        path, body = chat({"role": "system", "content": [part(PNG)]}, user("x"))
        response = httpx.post(running.url + path, json=body, timeout=60)
        assert response.status_code == 400
        assert "takes text alone" in error(response)["message"]


@pytest.mark.slow
def test_a_folder_without_a_chat_template_takes_pictures(tmp_path: Path) -> None:
    """sgl-project/sglang#5248: the server crashed."""
    with serving(folder=write_folder(tmp_path, None)) as running:
        path, body = chat(user("a", part(PNG)))
        assert httpx.post(running.url + path, json=body, timeout=60).status_code == 200


@pytest.mark.slow
def test_a_photo_is_scaled_rather_than_refused(http: httpx.Client) -> None:
    """raullenchai/Rapid-MLX#2473: 5000x4000 pixels were more tokens than may be."""
    photo = picture(5000, 4000, form="JPEG")
    found = http.post("/tokenize", json={"messages": [user(part(photo))]})
    assert found.json()["tokens"].count(TOKEN) <= 64
