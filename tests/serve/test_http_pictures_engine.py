"""Pictures from a request to the answer, with the real engine: `torchwright serve` on a tiny model."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_support import Command, command
from picture_support import TEMPLATE
from PIL import Image

import vlms
from torchwright.models.vision.question import question_about
from torchwright.optimization.open_model import open_model

pytestmark = pytest.mark.slow  # `test_engine_pictures` asks the same engine in its own process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("vision")
    vlms.save("Qwen2_5_VL", found)
    (found / "chat_template.jinja").write_text(
        TEMPLATE.replace("<|im_start|>", "[").replace("<|im_end|>", "]")
    )
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Command]:
    with command(str(folder), "--kv-memory", "16MiB") as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Command) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def file(folder: Path, seed: int, height: int = 60, width: int = 90) -> Path:
    found = folder / f"picture{seed}.png"
    Image.fromarray(vlms.picture(seed, height, width)).save(found)
    return found


def part(path: Path) -> dict[str, Any]:
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def asked(*paths: Path, **more: Any) -> dict[str, Any]:
    content = [*map(part, paths), {"type": "text", "text": "What?"}]
    message = {"role": "user", "content": content}
    return {"messages": [message], "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}


def test_an_answer_is_that_of_generate(http: httpx.Client, folder: Path, tmp_path: Path) -> None:
    images = [file(tmp_path, 1), file(tmp_path, 2, 84, 56)]
    model: Any = open_model(str(folder)).model
    for some in ([], images[:1], images[1:], images):
        response = http.post("/v1/chat/completions", json=asked(*some))
        assert response.status_code == 200, response.text
        found = response.json()
        ids = question_about(folder, "What?", some).ids
        pictures = [question_about(folder, "What?", some).pictures] if some else None
        expected = model.decode(model.generate([ids], max_new_tokens=12, stop=[], pictures=pictures)[0])
        assert found["usage"]["prompt_tokens"] == len(ids)
        assert found["choices"][0]["message"]["content"] == expected


def test_a_second_question_finds_the_picture_in_the_cache(http: httpx.Client, tmp_path: Path) -> None:
    large = file(tmp_path, 5, 112, 112)
    cached = []
    for _ in range(2):
        usage = http.post("/v1/chat/completions", json=asked(large)).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] < cached[1]


def test_a_stream_and_the_other_apis_look_at_it_too(http: httpx.Client, tmp_path: Path) -> None:
    image = file(tmp_path, 1)
    data = base64.b64encode(image.read_bytes()).decode()
    whole = http.post("/v1/chat/completions", json=asked(image)).json()["choices"][0]["message"]["content"]
    lines = http.post("/v1/chat/completions", json=asked(image, stream=True)).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == whole
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    body = asked() | {"messages": [{"role": "user", "content": content}]}
    assert http.post("/v1/messages", json=body).json()["content"][0]["text"] == whole
    item = {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
            {"type": "input_text", "text": "What?"},
        ],
    }
    body = {"input": [item], "max_output_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/responses", json=body).json()
    assert answer["output"][0]["content"][0]["text"] == whole


def test_rare_pictures_do_not_end_the_engine(http: httpx.Client, tmp_path: Path) -> None:
    sizes = [(8, 8), (8, 1500), (1500, 8), (27, 29), (1000, 1000)]
    for number, size in enumerate(sizes):
        assert http.post("/v1/chat/completions", json=asked(file(tmp_path, number, *size))).status_code == 200
    beside = asked(file(tmp_path, 1), file(tmp_path, 1), n=3)
    assert len(http.post("/v1/chat/completions", json=beside).json()["choices"]) == 3
    assert http.post("/v1/chat/completions", json=asked()).status_code == 200
    assert http.get("/health").status_code == 200
