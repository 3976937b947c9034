"""Pictures in requests: every API's way to send them, their places in the prompt, and what is refused."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from http_support import Running, error, serving, submits
from picture_support import BOMBS, PLACE, TEMPLATE, TOKEN, part, picture, saved, text, url, user, write_folder
from PIL import Image

from torchwright.models.vision.reader import takes_pictures
from torchwright.serve.api_error import ApiError
from torchwright.serve.folder import find
from torchwright.serve.limits import Limits
from torchwright.serve.openai.conversation import Tools
from torchwright.serve.openai.language import Language, load_language
from torchwright.serve.openai.parts import Message
from torchwright.serve.openai.picture_prompt import prompt_of
from torchwright.serve.wire.messages import Submit, ToEngine

NONE = Tools(functions=(), choice="none")
SMALL = picture(56, 56)
"""Four tokens."""
WIDE = picture(84, 56)
"""Six."""
HELD_BYTES = 2 << 20
"""More than the 64 smallest pictures, or five of 112 x 112 pixels, take once they are prepared; less than eight."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def language(folder: Path) -> Language:
    return load_language(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with serving(folder=folder, limits=Limits(pictures_held_bytes=HELD_BYTES)) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def shown(submit: Submit, language: Language) -> str:
    return language.tokenizer.decode(submit.ids, special=True)


def places(tokens: int) -> str:
    return PLACE.replace("<|image_pad|>", "<|image_pad|>" * tokens)


def block(content: bytes) -> dict[str, Any]:
    data = base64.b64encode(content).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": data}}


CALL = {"id": "call1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "call1", "name": "look", "input": {}}
TWO = f"<|im_start|>user\nA{places(4)}B{places(6)}<|im_end|>\n"
ASKED: dict[str, tuple[str, dict[str, Any], str, list[int]]] = {
    "two pictures": (
        "/v1/chat/completions",
        {"messages": [user("A", part(SMALL), "B", part(WIDE))]},
        TWO,
        [4, 6],
    ),
    "the URL as a text": (
        "/v1/chat/completions",
        {"messages": [user({"type": "image_url", "image_url": url(SMALL)})]},
        f"user\n{places(4)}<|im_end|>",
        [4],
    ),
    "detail high": (
        "/v1/chat/completions",
        {"messages": [user(part(SMALL, detail="high"))]},
        places(4),
        [4],
    ),
    "a system's, an assistant's and a tool's": (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": [part(SMALL)]},
                user("x"),
                {"role": "assistant", "content": [part(WIDE)], "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call1", "content": [text("y"), part(SMALL)]},
            ]
        },
        f"system\n{places(4)}<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n{places(6)}<|im_end|>\n"
        f"<|im_start|>tool\ny{places(4)}<|im_end|>",
        [4, 6, 4],
    ),
    "Anthropic's": (
        "/v1/messages",
        {
            "max_tokens": 3,
            "messages": [{"role": "user", "content": [text("A"), block(SMALL), text("B"), block(WIDE)]}],
        },
        TWO,
        [4, 6],
    ),
    "Anthropic's, in a tool's result": (
        "/v1/messages",
        {
            "max_tokens": 3,
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": [USE]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "call1", "content": [block(SMALL)]},
                        {
                            "type": "tool_result",
                            "tool_use_id": "call1",
                            "is_error": True,
                            "content": [block(WIDE)],
                        },
                    ],
                },
            ],
        },
        f"<|im_start|>tool\n{places(4)}<|im_end|>\n<|im_start|>tool\nError: {places(6)}<|im_end|>",
        [4, 6],
    ),
    "Responses'": (
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "A"},
                        {"type": "input_image", "image_url": url(SMALL), "detail": "auto"},
                        {"type": "input_text", "text": "B"},
                        {"type": "input_image", "image_url": url(WIDE), "file_id": None},
                    ],
                }
            ]
        },
        TWO,
        [4, 6],
    ),
    "Responses', in a function's output": (
        "/v1/responses",
        {
            "input": [
                {"type": "function_call", "call_id": "call1", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "call1",
                    "output": [{"type": "input_image", "image_url": url(SMALL)}],
                },
            ]
        },
        f"<|im_start|>tool\n{places(4)}<|im_end|>",
        [4],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_pictures_come_in_their_places(
    http: httpx.Client, sent: list[ToEngine], language: Language, name: str
) -> None:
    path, body, expected, tokens = ASKED[name]
    if path == "/v1/chat/completions":
        body = body | {"max_tokens": 3}
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    [submit] = submits(sent)
    assert expected in shown(submit, language)
    assert [one.tokens for one in submit.pictures] == tokens
    assert submit.ids.count(TOKEN) == sum(tokens)
    usage = response.json()["usage"]
    counted = usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert counted == len(submit.ids)


@pytest.mark.slow
def test_what_is_sent_is_what_the_processor_prepares(
    http: httpx.Client, sent: list[ToEngine], language: Language
) -> None:
    assert language.pictures is not None
    http.post("/v1/chat/completions", json={"messages": [user(part(SMALL), part(WIDE))], "max_tokens": 1})
    expected = [language.pictures.read(content).picture for content in (SMALL, WIDE)]
    assert submits(sent)[0].pictures == expected


def test_counts_of_tokens_have_those_of_pictures(http: httpx.Client, language: Language) -> None:
    asked = {"messages": [{"role": "user", "content": [text("A"), block(WIDE)]}]}
    counted = http.post("/v1/messages/count_tokens", json=asked).json()["input_tokens"]
    found = http.post("/tokenize", json={"messages": [user("A", part(WIDE))]}).json()
    assert counted == found["count"] == len(found["tokens"])
    assert found["tokens"].count(TOKEN) == 6


def test_low_detail_scales_down_first(language: Language) -> None:
    assert language.pictures is not None
    large = picture(1120, 560)
    tokens = []
    for detail in ("high", "low"):
        message = Message.model_validate(user(part(large, detail=detail)))
        [found] = prompt_of(language, [message], NONE, "messages").pictures
        tokens.append(found.tokens)
    [by_hand] = [language.pictures.read(Image.open(io.BytesIO(large)).resize((512, 256))).picture.tokens]
    assert tokens[1] == by_hand <= tokens[0]


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_and_the_server_lives(http: httpx.Client, server: Running, name: str) -> None:
    body = {"messages": [user("A", part(WIDE), part(BOMBS[name]()))], "max_tokens": 1}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    found = error(response)
    assert found["code"] in ("invalid_image", "request_limit")
    assert "picture 2 cannot be used" in found["message"] or "memory" in found["message"]
    assert server.service.client.restarts == 0


WORDS = ["<|image_pad|>", "<|image_pad|>" * 3, PLACE, "a <|image_pad|>"]


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("pictures", [0, 1])
def test_a_clients_own_words_are_no_places(
    http: httpx.Client, sent: list[ToEngine], language: Language, words: str, pictures: int
) -> None:
    """Nor do they change where a picture is: vllm#57740, sglang#37579, transformers#47217."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": f'{{"a": "{words}"}}'}}
    messages = [
        {"role": "system", "content": words},
        user(words, *[part(SMALL)] * pictures, words),
        {"role": "assistant", "content": words, "reasoning_content": words, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": words},
        user(f"{words} {words}"),
    ]
    response = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert response.status_code == 200, response.text
    [submit] = submits(sent)
    assert submit.ids.count(TOKEN) == 4 * pictures
    if pictures:
        [begin] = [at for at, one in enumerate(submit.ids) if one == TOKEN and submit.ids[at - 1] != TOKEN]
        before = language.tokenizer.decode(submit.ids[:begin], special=True)
        assert before.endswith(f"<|im_start|>user\n{words}<|vision_start|>")
    assert shown(submit, language).replace(places(4), "").count("<|image_pad|>") >= 7  # as text


def test_words_in_pieces_are_no_place_either(http: httpx.Client) -> None:
    """A template that puts parts together could make a place of two of a client's texts."""
    for more in ([], [part(SMALL)]):
        body = {"messages": [user("<|image", "_pad|>", *more)], "max_tokens": 1}
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert "places for" in error(response)["message"]


@pytest.mark.parametrize("prompt", ["<|image_pad|>", [261], "a <|image_pad|>", [64, 261, 65]])
def test_a_completion_has_no_places(http: httpx.Client, language: Language, prompt: Any) -> None:
    response = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    assert response.status_code == 400
    assert "send pictures as parts of messages" in error(response)["message"]
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "User: A\n<|image_pad|>\nB\n\nAssistant:"),
        (
            "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}",
            "[user]A\n<|image_pad|>\nB",
        ),
        (TEMPLATE, f"user\nA{PLACE}B<|im_end|>"),
        (
            "{% for m in messages %}{% for p in m.content | selectattr('type', 'equalto', 'image') %}<|image_pad|>"
            "{% endfor %}{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}"
            "{% endfor %}",
            "<|image_pad|>AB",
        ),
    ],
    ids=["none", "texts alone", "parts", "pictures first"],
)
def test_templates_of_every_form_have_places(tmp_path: Path, template: str | None, expected: str) -> None:
    language = load_language(write_folder(tmp_path, template))
    message = Message.model_validate(user("A", part(SMALL), "B"))
    prompts = prompt_of(language, [message], NONE, "messages")
    [found] = prompts.items
    assert isinstance(found, str)
    assert expected.replace("<|image_pad|>", "<|image_pad|>" * 4) in found


def test_a_template_that_leaves_pictures_out_is_no_silent_loss(tmp_path: Path) -> None:
    source = TEMPLATE.replace(
        "{%- if part.type == 'image' %}", "{%- if part.type == 'image' and message.role == 'user' %}"
    )
    source = source.replace("{{- part.text }}", "{{- part.text or '' }}")
    language = load_language(write_folder(tmp_path, source))
    asked = [user("x"), {"role": "assistant", "content": [part(SMALL)]}, user("y")]
    with pytest.raises(ApiError, match="0 places for 1 pictures"):
        prompt_of(language, [Message.model_validate(one) for one in asked], NONE, "messages")


@pytest.mark.plain("/v1/chat/completions-body0")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [user(part(SMALL))]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [block(SMALL)]}]}),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url(SMALL)}]}]},
        ),
        ("/tokenize", {"messages": [user(part(SMALL))]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [block(SMALL)]}]}),
    ],
)
def test_a_model_of_text_alone_says_so(path: str, body: dict[str, Any]) -> None:
    with serving() as running, httpx.Client(base_url=running.url, timeout=60) as http:
        response = http.post(path, json=body)
        assert response.status_code == 400
        assert "the served model takes text alone" in error(response)["message"]
        [card] = http.get("/v1/models").json()["data"]
        assert card["input_modalities"] == ["text"]


def test_the_card_says_what_is_taken(http: httpx.Client) -> None:
    assert http.get("/v1/models").json()["data"][0]["input_modalities"] == ["text", "image"]
    assert http.get("/model_info").json()["has_image_understanding"] is True


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"type": "input_audio", "input_audio": {}},
            "'input_audio' is not supported: this server takes text",
        ),
        ({"type": "image_url", "image_url": {}}, "url' is missing"),
        ({"type": "image_url", "image_url": {"url": ""}}, "at least 1 character"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "tiny"}}, "detail"),
        ({"type": "image_url", "image_url": {"url": "x", "format": "png"}}, "format"),
        ({"type": "image_url"}, "image_url' is missing"),
    ],
)
def test_wrong_parts_name_what_is_wrong(http: httpx.Client, more: dict[str, Any], words: str) -> None:
    response = http.post("/v1/chat/completions", json={"messages": [user(more)]})
    assert response.status_code == 400
    assert words in error(response)["message"]


def test_files_of_others_are_refused_by_name(http: httpx.Client) -> None:
    item = {
        "role": "user",
        "content": [{"type": "input_image", "file_id": "file-1", "image_url": url(SMALL)}],
    }
    response = http.post("/v1/responses", json={"input": [item]})
    assert response.status_code == 400
    assert "no files are stored here" in error(response)["message"]
    source = {"type": "file", "file_id": "file-1"}
    asked = {
        "max_tokens": 1,
        "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
    }
    assert "'file' is not supported" in error(http.post("/v1/messages", json=asked))["message"]


def test_videos_are_named_where_an_api_or_a_model_takes_none(http: httpx.Client) -> None:
    """Anthropic's API has no block for them: the answer says which APIs have."""
    data = url(SMALL, "video/mp4")
    source = {"type": "base64", "media_type": "video/mp4", "data": data.partition(",")[2]}
    for block_of in ({"type": "video", "source": source}, {"type": "video_url", "video_url": {"url": data}}):
        asked = {"messages": [{"role": "user", "content": [block_of]}]}
        for path, more in (("/v1/messages", {"max_tokens": 1}), ("/v1/messages/count_tokens", {})):
            response = http.post(path, json=asked | more)
            assert response.status_code == 400
            said = response.json()["error"]["message"]
            assert f"'{block_of['type']}' is not supported: this server takes text and pictures" in said
            assert "/v1/chat/completions as video_url" in said
    for path, body in (
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_video", "video_url": data}]}]},
        ),
        ("/v1/chat/completions", {"messages": [user({"type": "video_url", "video_url": data})]}),
    ):
        response = http.post(path, json=body)
        assert response.status_code == 400
        assert "takes no videos for this model" in error(response)["message"]
    wrong = {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": data}]}]}
    assert "videos (input_video)" in error(http.post("/v1/responses", json=wrong))["message"]


def test_pictures_are_bounded_in_number_and_together(http: httpx.Client, language: Language) -> None:
    tiny = part(picture(28, 28))
    for count, status in ((64, 200), (65, 400)):
        body = {"messages": [user(*[tiny] * count)], "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=body).status_code == status
    messages = [Message.model_validate(user(*[part(WIDE)] * 2))]
    with pytest.raises(ApiError, match="picture 2 cannot be used: with it the model would read"):
        prompt_of(language, messages, NONE, "messages", prepared_bytes=200_000)


@pytest.mark.slow
def test_a_body_with_pictures_may_be_larger(server: Running, http: httpx.Client) -> None:
    """A photo has more bytes than a body of text may have."""

    noise = np.random.default_rng(0).integers(0, 256, (2048, 2048, 3), np.uint8)
    large = saved(Image.fromarray(noise), "PNG")
    assert len(large) > 8 << 20
    asked = {"messages": [user(part(large))], "max_tokens": 1}
    assert http.post("/v1/chat/completions", json=asked).status_code == 200
    most = server.service.limits.body_bytes
    assert http.post("/v1/chat/completions", content=b" " * (most + 1), headers=JSON).status_code == 413


JSON = {"content-type": "application/json"}


def test_pictures_of_all_requests_are_bounded(http: httpx.Client, server: Running) -> None:
    large = part(picture(112, 112))
    few, many = ({"messages": [user(*[large] * count)], "max_tokens": 1} for count in (5, 8))
    for _ in range(3):
        assert http.post("/v1/chat/completions", json=few).status_code == 200
    response = http.post("/v1/chat/completions", json=many)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert server.service.client._pictures == {}  # pyright: ignore[reportPrivateUsage]


def test_which_folders_take_pictures(folder: Path, tmp_path: Path) -> None:
    assert takes_pictures(folder)
    assert not takes_pictures(tmp_path)
    write_folder(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    assert not takes_pictures(tmp_path)


def refuses(running: Running) -> None:
    """It takes text as ever, and says of pictures that it takes none."""
    with httpx.Client(base_url=running.url, timeout=60) as http:
        response = http.post("/v1/chat/completions", json={"messages": [user(part(SMALL))]})
        assert response.status_code == 400
        assert "the served model takes text alone" in error(response)["message"]
        asked = {"messages": [user("hi")], "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=asked).status_code == 200


@pytest.mark.slow
def test_an_engine_that_takes_none_is_believed(folder: Path) -> None:
    """As on a GPU, so far, or where the vision encoder cannot be loaded."""
    with serving(folder=folder, kind="sightless") as running:
        refuses(running)
        card = httpx.get(f"{running.url}/v1/models").json()["data"][0]
        assert card["input_modalities"] == ["text"]


@pytest.mark.slow
def test_a_processor_that_cannot_be_loaded_leaves_text(tmp_path: Path) -> None:
    (write_folder(tmp_path) / "preprocessor_config.json").write_text("[")
    with serving(folder=tmp_path) as running:
        refuses(running)


LOADS = """
import sys
from torchwright.serve.http import read_worker
read_worker.load(sys.argv[1], True, 1 << 20, 1 << 20)
print(sorted({"torch", "transformers", "PIL"} & set(sys.modules)))
"""


def loaded(path: Path) -> str:
    command = [sys.executable, "-c", LOADS, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.slow
def test_a_text_model_costs_no_import_of_transformers() -> None:
    assert loaded(find(None).folder) == "[]"


@pytest.mark.slow
def test_a_model_of_pictures_imports_transformers(folder: Path) -> None:
    """And so the test before sees an import where there is one."""
    assert "transformers" in loaded(folder)
