"""Each family from a request to the answer: `torchwright serve` gives the tokens of transformers' whole model."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from http_support import command
from PIL import Image
from test_http_videos import clip

import videos
import vlms
from torchwright.hub.chat_template import ChatTemplate
from torchwright.hub.tokenizer import open_tokenizer
from torchwright.models.vision.question import question_about
from torchwright.models.vision.reader import PictureReader
from torchwright.optimization.open_model import open_model

pytestmark = pytest.mark.slow
"""A server each."""
FAMILIES = [
    *vlms.named_hosts(("Mistral3", "Lfm2Vl", "SmolVLM", "InternVL", "PaddleOCRVL")),
    *("Gemma4", "Gemma4, pictures seen whole"),
]
TEMPLATE = """\
{%- for message in messages %}{{- '[' + message.role + ']' }}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- 'IMAGE' }}{%- elif part.type == 'video' %}{{- 'VIDEO' }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}"""
NEW = 10
EXACT = ("--dtype", "fp32", "--no-deterministic")
"""Layers of PyTorch: their tokens are those of transformers."""


def write_template(folder: Path) -> None:
    places = PictureReader(folder).placeholders
    text = TEMPLATE.replace("IMAGE", places["image"]).replace("VIDEO", places.get("video", ""))
    (folder / "chat_template.jinja").write_text(text)


def shown(path: Path) -> dict[str, Any]:
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def body(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}
    return {"messages": [message], "max_tokens": NEW, "temperature": 0, "ignore_eos": True, **more}


def whole_answer(whole: Any, folder: Path, kinds: list[str], **media: Any) -> str:
    """transformers' greedy tokens of the same conversation, as our tokenizer writes them."""
    processor = vlms.processor_of(folder, videos="videos" in media)
    content = [*({"type": kind} for kind in kinds), {"type": "text", "text": "What?"}]
    text = ChatTemplate(folder).render([{"role": "user", "content": content}])
    inputs = processor(text=[text], return_tensors="pt", add_special_tokens=False, **media)
    with torch.inference_mode():
        out = whole.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return open_tokenizer(folder).decode(out[0, inputs["input_ids"].shape[1] :].tolist())


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_is_that_of_the_whole_model(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    whole = vlms.save(name, folder)
    write_template(folder)
    files, pictures = [], [vlms.picture(1), vlms.picture(2, 84, 56)]
    for number, picture in enumerate(pictures):
        files.append(tmp_path / f"{number}.png")
        Image.fromarray(picture).save(files[-1])
    with (
        command(str(folder), *EXACT, "--kv-memory", "64MiB") as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        [model] = http.get("/v1/models").json()["data"]
        assert model["input_modalities"] == ["text", "image"]
        for count in (1, 2):
            response = http.post("/v1/chat/completions", json=body(*map(shown, files[:count])))
            assert response.status_code == 200, response.text
            want = whole_answer(whole, folder, ["image"] * count, images=[pictures[:count]])
            assert response.json()["choices"][0]["message"]["content"] == want


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL"])
def test_an_answer_about_a_video_is_that_of_the_whole_model(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="transformers prepares videos with torchvision")
    whole = vlms.save(name, tmp_path, videos=True)
    write_template(tmp_path)
    contents = [videos.encoded(videos.frames(26, seed=seed)) for seed in (0, 1)]
    answers = []
    with (
        command(str(tmp_path), *EXACT, "--kv-memory", "16MiB") as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        for content in (contents[0], contents[1], contents[0]):
            response = http.post("/v1/chat/completions", json=body(clip(content)))
            assert response.status_code == 200, response.text
            answers.append(response.json()["choices"][0]["message"]["content"])
            frames = videos.decoded(content)
            facts = [{"total_num_frames": len(frames), "fps": videos.RATE}]
            media = {"videos": [frames], "video_metadata": facts, "do_sample_frames": True, "fps": 2.0}
            assert answers[-1] == whole_answer(whole, tmp_path, ["video"], **media)
    assert (
        answers[0] == answers[2] != answers[1]
    )  # ikawrakow/ik_llama.cpp#904: the cache held another picture


def test_an_adapter_of_pictures_is_trained_and_served(tmp_path: Path) -> None:
    """The two commands of docs/train.md."""
    from torchwright.cli import main

    folder = tmp_path / "model"
    vlms.save("Qwen2_5_VL", folder)
    text = TEMPLATE.replace("{%- endfor %}{%- endfor %}", "{%- endfor %}{{- '</s>' }}{%- endfor %}")
    places = PictureReader(folder).placeholders
    text = text.replace("IMAGE", places["image"]).replace("VIDEO", places["video"])
    (folder / "chat_template.jinja").write_text(text)
    rows = []
    for number in range(6):
        Image.fromarray(np.full((56, 56, 3), 40 * number, np.uint8)).save(tmp_path / f"{number}.png")
        content = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "What?"}]
        answer = {"role": "assistant", "content": [{"type": "text", "text": "0123456789"}]}
        rows.append(json.dumps({"messages": [{"role": "user", "content": content}, answer]}))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    words = [
        "--model",
        str(folder),
        "--data",
        str(tmp_path / "rows.jsonl"),
        "--lora",
        "r=8",
        "-o",
        str(tmp_path / "out"),
    ]
    assert main(["train", *words, "--no-validation", "--epochs", "3", "--quiet"]) == 0
    with (
        command(str(folder), "--adapter", f"mine={tmp_path / 'out' / 'adapter'}", *EXACT) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        asked = body(shown(tmp_path / "3.png"), logprobs=True)
        plain = http.post("/v1/chat/completions", json=asked).json()["choices"][0]
        mine = http.post("/v1/chat/completions", json=asked | {"model": "mine"}).json()["choices"][0]
    assert plain["logprobs"]["content"][0]["logprob"] != mine["logprobs"]["content"][0]["logprob"]
    merged: Any = open_model(str(tmp_path / "out" / "model"), dtype="fp32", device="cpu").model
    question = question_about(folder, "What?", [tmp_path / "3.png"])
    found = merged.generate([question.ids], pictures=[question.pictures], max_new_tokens=NEW, stop=[])
    assert mine["message"]["content"] == merged.decode(found[0])
