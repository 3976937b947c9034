"""Videos in requests: their places in the prompt, and those of unfriendly clients, each refused with a 400."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from http_support import Running, error, serving, submits
from picture_support import PLACE, TEMPLATE, part, picture, url, user, write_folder
from PIL import Image

import videos
from torchwright.serve.limits import INPUT_VIDEO_BYTES
from torchwright.serve.wire.messages import ToEngine

pytest.importorskip(
    "torchvision", reason="transformers prepares videos with torchvision, which is not installed"
)
pytest.importorskip("av", reason="videos are read with PyAV, which is not installed")

FRAMES = videos.frames(16, 56, 56)
MP4 = videos.encoded(FRAMES)
"""Two seconds: four frames, in pairs."""
STILL = picture(56, 56)
SHOW = TEMPLATE.replace(
    "{%- else %}{{- part.text }}",
    "{%- elif part.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}{%- else %}{{- part.text }}",
)


def write_video_folder(folder: Path) -> Path:
    """A folder of Qwen2.5-VL whose processor prepares videos: a token for 28 x 28 pixels of two frames."""
    from transformers import Qwen2VLVideoProcessor

    write_folder(folder, SHOW)
    Qwen2VLVideoProcessor(min_pixels=28 * 28, max_pixels=16 * 28 * 28).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"video_token_id": config["image_token_id"] + 1}))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(folder=write_video_folder(tmp_path_factory.mktemp("video"))) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def clip(content: bytes | str, kind: str = "video/mp4") -> dict[str, Any]:
    text = content if isinstance(content, str) else url(content, kind)
    return {"type": "video_url", "video_url": {"url": text}}


def ask(http: httpx.Client, *parts: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": [user(*parts)], "max_tokens": 1})


def png(frame: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG")
    return file.getvalue()


def listed(files: list[bytes]) -> str:
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(file).decode() for file in files)


GOOD: dict[str, tuple[Any, int]] = {
    "mp4": (clip(MP4), 2),
    "the URL as a text": ({"type": "video_url", "video_url": url(MP4, "video/mp4")}, 2),
    "a wrong type": (clip(MP4, "text/html"), 2),
    "gif": (clip(videos.animated(FRAMES), "image/gif"), 2),
    "webp": (clip(videos.animated(FRAMES, "WEBP"), "image/webp"), 2),
    "webm": (clip(videos.encoded(FRAMES, "matroska"), "video/webm"), 2),
    "frames": (clip(listed([png(frame) for frame in FRAMES[:6]])), 3),
}


@pytest.mark.parametrize("name", GOOD)
def test_videos_come_in_their_places(http: httpx.Client, sent: list[ToEngine], name: str) -> None:
    given, pairs = GOOD[name]
    response = ask(http, "A", given, "B", part(STILL), "C")
    assert response.status_code == 200, response.text
    [submit] = submits(sent)
    moving, still = submit.pictures
    assert (moving.moves, still.moves) == (True, False)
    assert moving.arrays["video_grid_thw"].numpy().tolist() == [[pairs, 4, 4]]
    assert (moving.tokens, still.tokens) == (4 * pairs, 4)
    shown = http.post("/tokenize", json={"messages": [user("A", given)]}).json()
    assert shown["tokens"].count(max(submit.ids)) == 4 * pairs


INPUT_VIDEO = {"type": "input_video", "video_url": url(MP4, "video/mp4")}
CALL = {"type": "function_call", "call_id": "call1", "name": "look", "arguments": "{}"}


@pytest.mark.parametrize("moves", [INPUT_VIDEO, clip(MP4)], ids=["a part of its own", "a chat's part"])
def test_responses_take_videos_in_their_places(
    http: httpx.Client, sent: list[ToEngine], moves: dict[str, Any]
) -> None:
    """In messages, and in what functions return."""
    content = [{"type": "input_text", "text": "A"}, moves, {"type": "input_image", "image_url": url(STILL)}]
    output = {"type": "function_call_output", "call_id": "call1", "output": [moves]}
    asked = {"input": [{"role": "user", "content": content}, CALL, output], "max_output_tokens": 1}
    response = http.post("/v1/responses", json=asked)
    assert response.status_code == 200, response.text
    [submit] = submits(sent)
    assert [(shown.moves, shown.tokens) for shown in submit.pictures] == [(True, 8), (False, 4), (True, 8)]


@pytest.mark.parametrize("name", ["a playlist", "too large", "another host", "a file", "a thousand frames"])
def test_a_videos_limits_are_those_of_chats_in_responses(http: httpx.Client, name: str) -> None:
    part = {"type": "input_video", "video_url": BAD[name]}
    response = http.post("/v1/responses", json={"input": [{"role": "user", "content": [part]}]})
    chat = ask(http, clip(BAD[name]))
    assert (response.status_code, chat.status_code) == (400, 400)
    assert error(response)["message"] == error(chat)["message"].replace("'messages'", "'input'")
    several = http.post(
        "/v1/responses",
        json={"input": [{"role": "user", "content": [INPUT_VIDEO] * 5}], "max_output_tokens": 1},
    )
    assert "at most 4 are read" in error(several)["message"]


def test_the_server_says_that_it_takes_videos(http: httpx.Client) -> None:
    [model] = http.get("/v1/models").json()["data"]
    assert model["input_modalities"] == ["text", "image", "video"]


def test_a_clients_own_words_are_no_places(http: httpx.Client, sent: list[ToEngine]) -> None:
    place = PLACE.replace("image", "video")
    response = ask(http, place, clip(MP4), "<|video_pad|>" * 3)
    assert response.status_code == 200, response.text
    assert submits(sent)[0].ids.count(262) == 8
    assert http.post("/v1/completions", json={"prompt": "<|video_pad|>", "max_tokens": 1}).status_code == 400


BOMB = videos.animated(np.zeros((2, 64, 64, 3), np.uint8))
LONG = videos.animated(
    np.random.default_rng(0).integers(0, 256, (2000, 8, 8, 3), np.uint8), milliseconds=20_000
)
BAD: dict[str, str] = {
    "nothing": url(b"", "video/mp4"),
    "letters": url(b"abc", "video/mp4"),
    "zeros": url(bytes(10_000), "video/mp4"),
    "random": url(random.Random(0).randbytes(10_000), "video/mp4"),
    "a picture": url(STILL, "video/mp4"),
    "cut in the middle": url(MP4[: len(MP4) // 2], "video/mp4"),
    "cut short, its index first": url(
        (fast := videos.encoded(FRAMES, movflags="faststart"))[: int(len(fast) * 0.7)], "video/mp4"
    ),
    "without its beginning": url(MP4[100:], "video/mp4"),
    "a GIF of huge sides": url(BOMB[:6] + b"\xff\xff\xff\xff" + BOMB[10:], "image/gif"),
    "eleven hours": url(LONG, "image/gif"),
    "frames that are none": "data:video/jpeg;base64,AAAA,BBBB",
    "a thousand frames": listed([png(FRAMES[0])] * 1000),
    "frames of two sizes": listed([png(FRAMES[0]), png(FRAMES[0][:40])]),
    "empty frames": "data:video/jpeg;base64," + "," * 100,
    "no URL": "video.mp4",
    "a file": "file:///etc/passwd",
    "not base64": "data:video/mp4,abc",
    "wrong base64": "data:video/mp4;base64,!!!!",
    "a playlist": url(b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/\n", "video/mp4"),
    "too large": "data:video/mp4;base64," + "A" * (INPUT_VIDEO_BYTES * 4 // 3 + 8),
    "another host": "https://example.com/a.mp4",
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_usable_video_is_refused(http: httpx.Client, name: str) -> None:
    response = ask(http, part(STILL), clip(BAD[name]))
    assert response.status_code == 400, response.text
    found = error(response)
    assert found["code"] in ("invalid_video", "request_limit", "invalid_image_url")
    assert len(found["message"]) < 700


def test_a_video_is_no_picture(http: httpx.Client) -> None:
    response = ask(http, part(MP4))
    assert response.status_code == 400
    assert error(response)["code"] == "invalid_image"


def test_many_videos_are_refused_before_any_is_read(http: httpx.Client) -> None:
    response = ask(http, *[clip(MP4)] * 5)
    assert response.status_code == 400
    assert "at most 4 are read" in error(response)["message"]


def test_damaged_files_are_refused_or_read(http: httpx.Client) -> None:
    statuses = set[int]()
    for seed in range(12):
        draw, damaged = random.Random(seed), bytearray(MP4)
        for at in draw.sample(range(16, len(MP4)), 40):
            damaged[at] ^= draw.randrange(1, 256)
        statuses.add(ask(http, clip(bytes(damaged))).status_code)
    assert statuses <= {200, 400}


def test_a_model_of_pictures_alone_says_so(tmp_path: Path) -> None:
    with (
        serving(folder=write_folder(tmp_path)) as running,
        httpx.Client(base_url=running.url, timeout=120) as client,
    ):
        response = ask(client, clip(MP4))
        assert response.status_code == 400
        assert "takes no videos for this model" in error(response)["message"]
        [model] = client.get("/v1/models").json()["data"]
        assert model["input_modalities"] == ["text", "image"]


def test_the_server_lives(http: httpx.Client, server: Running) -> None:
    """After all of the above."""
    assert server.service.client.restarts == 0
    assert ask(http, clip(MP4)).status_code == 200
