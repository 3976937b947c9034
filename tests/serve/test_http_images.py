"""Pictures as clients ask for them, over a fake engine."""

from __future__ import annotations

import base64
import io
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from fake_engine import DIES, LONG, NEVER
from http_support import MODEL, Running, serving, wait_until

Image = pytest.importorskip("PIL.Image", reason="pictures are written with Pillow")

PATH = "/v1/images/generations"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(kind="painter") as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def _nothing_left(server: Running) -> Iterator[None]:
    yield
    wait_until(server.cancelled)


def opened(item: dict[str, object]):
    return Image.open(io.BytesIO(base64.b64decode(str(item["b64_json"]))))


def test_a_picture(http):
    found = http.post(
        PATH, json={"prompt": "four", "size": "32x16", "seed": 7, "steps": 9, "model": MODEL, "user": "me"}
    ).json()
    assert (found["size"], found["output_format"]) == ("32x16", "png")
    assert found["created"] <= time.time()
    (item,) = found["data"]
    picture = opened(item)
    assert (picture.format, picture.size, item["seed"]) == ("PNG", (32, 16), 7)
    assert picture.getpixel((31, 15)) == (7, 9, 4)


def test_several_have_seeds_that_follow(http):
    found = http.post(PATH, json={"prompt": "a", "n": 3, "seed": 254}).json()["data"]
    assert [item["seed"] for item in found] == [254, 255, 256]
    assert [opened(item).getpixel((0, 0))[0] for item in found] == [254, 255, 0]
    assert opened(found[0]).size == (24, 16)  # the model's own


def test_what_was_left_out_of_a_prompt_is_told(http):
    assert http.post(PATH, json={"prompt": "a " * LONG}).json()["notices"] == ["left out"]
    assert "notices" not in http.post(PATH, json={"prompt": "a"}).json()


def test_seeds_are_drawn(http):
    seeds = {http.post(PATH, json={"prompt": "a"}).json()["data"][0]["seed"] for _ in range(4)}
    assert len(seeds) == 4


@pytest.mark.parametrize(("form", "name"), [("jpeg", "JPEG"), ("webp", "WEBP")])
def test_other_forms(http, form, name):
    found = http.post(PATH, json={"prompt": "a", "output_format": form, "output_compression": 5}).json()
    assert opened(found["data"][0]).format == name


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "'prompt' is missing"),
        ({"prompt": ""}, "'prompt'"),
        ({"prompt": "a" * 10_001}, "'prompt'"),
        ({"prompt": "a", "n": 0}, "'n'"),
        ({"prompt": "a", "n": 11}, "'n'"),
        ({"prompt": "a", "size": "large"}, "512x512, the width first"),
        ({"prompt": "a", "size": "0x16"}, "512x512, the width first"),
        ({"prompt": "a", "size": "99999x99999"}, "at most 4,194,304 pixels"),
        ({"prompt": "a", "size": "17x16"}, "a picture of 16x17 pixels"),
        ({"prompt": "a", "steps": 0}, "'steps'"),
        ({"prompt": "a", "steps": 1001}, "'steps'"),
        ({"prompt": "a", "seed": -1}, "'seed'"),
        ({"prompt": "a", "response_format": "url"}, "nothing is stored here, so that there is no url"),
        ({"prompt": "a", "output_compression": 9}, "jpeg or webp"),
        ({"prompt": "a", "quality": "hd"}, "'quality' is not supported: give steps"),
        ({"prompt": "a", "style": "vivid"}, "say it in the prompt"),
        ({"prompt": "a", "background": "opaque"}, "the model paints one"),
        ({"prompt": "a", "stream": True}, "pictures come whole"),
        ({"prompt": "a", "cfg": 3}, "'cfg' is not supported"),
        ({"prompt": "a", "guidance": -1}, "'guidance'"),
        ({"prompt": "a", "negative_prompt": 3}, "'negative_prompt'"),
    ],
)
def test_what_is_refused(http, body, said):
    answer = http.post(PATH, json=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_another_model_is_not_there(http):
    assert http.post(PATH, json={"prompt": "a", "model": "other"}).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
def test_other_requests_are_told_what_is_served(http, path, body):
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "wrong_model_kind"


def test_other_models_make_no_pictures():
    with serving(kind="encoder") as running:
        answer = httpx.post(running.url + PATH, json={"prompt": "a"}, timeout=60)
    assert answer.status_code == 400
    assert "makes no pictures but is a sentence encoder" in answer.json()["error"]["message"]


def test_facts(http):
    assert http.get("/health_generate").status_code == 200
    assert http.get("/server_info").json()["is_embedding"] is False
    assert http.get("/model_info").json()["is_generation"] is False


def test_a_client_that_leaves_is_forgotten(server):
    """`_nothing_left` waits for it."""

    def leave() -> None:
        with httpx.Client(base_url=server.url, timeout=0.5) as http, pytest.raises(httpx.ReadTimeout):
            http.post(PATH, json={"prompt": NEVER, "n": 2})

    thread = threading.Thread(target=leave)
    thread.start()
    wait_until(lambda: server.service.client.waiting == 2)
    thread.join(30)


def test_openais_client(server):
    openai = pytest.importorskip("openai", reason="OpenAI's own client")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        found = client.images.generate(
            prompt="a", model=MODEL, size="16x16", response_format="b64_json", extra_body={"seed": 2}
        )
        assert found.data is not None
        assert found.data[0].b64_json
        with pytest.raises(openai.BadRequestError, match="no url"):
            client.images.generate(prompt="a", response_format="url")


def test_an_engine_that_dies_is_said():
    with serving(kind="painter") as running:
        answer = httpx.post(running.url + PATH, json={"prompt": DIES}, timeout=60)
    assert answer.status_code == 503


def test_guidance_negative_prompt_and_scheduler_are_taken(http):
    asked = {"prompt": "a", "guidance": 4, "negative_prompt": "blue", "scheduler": "euler", "n": 2}
    found = http.post(PATH, json=asked).json()["data"]
    assert [opened(item).getpixel((0, 0))[2] for item in found] == [5, 5]
