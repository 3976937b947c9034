"""Limits come before work: what cannot fit is not tokenized, the first fault ends a body, long ones are read apart."""

from __future__ import annotations

import asyncio
import json
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import tokenizers
from fake_engine import CONTEXT
from http_support import Running, serving, wait_until
from pydantic import BaseModel, ValidationError
from tokenizers import decoders, models, normalizers, pre_tokenizers

from torchwright.serve.api_error import ApiError
from torchwright.serve.folder import find
from torchwright.serve.http.app import OPERATIONS
from torchwright.serve.limits import LOGIT_BIASES, NESTING, Limits
from torchwright.serve.openai import reading
from torchwright.serve.openai.parse import parse
from torchwright.serve.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest
from torchwright.serve.openai.reading import ReadingJob
from torchwright.serve.openai.request_limits import RequestLimits
from torchwright.serve.text.codec import Tokenizer
from torchwright.serve.text.longest_token import byte_alphabet, longest_token
from torchwright.serve.workers.pool import Workers, WorkLimits

BYTES = {f"<0x{byte:02X}>": place for place, byte in enumerate(range(256))}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE(vocabulary, merges, **options))


def byte_level() -> tokenizers.Tokenizer:
    alphabet = {piece: place for place, piece in enumerate(byte_alphabet())}
    made = bpe({**alphabet, "aa": 256, "aaaa": 257}, [("a", "a"), ("aa", "aa")])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def by_bytes() -> tokenizers.Tokenizer:
    """As Llama 2's and Gemma's: white space is written ▁, and what is unknown as bytes."""
    made = bpe({**BYTES, "▁": 256, "a": 257, "▁▁▁▁▁▁": 258}, [], byte_fallback=True, fuse_unk=True)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def composing() -> tokenizers.Tokenizer:
    """As Qwen's: four characters may become one before it is looked up."""
    made = byte_level()
    made.normalizer = normalizers.NFC()
    return made


def collapsing() -> tokenizers.Tokenizer:
    made = byte_level()
    made.normalizer = normalizers.Replace("aaaaa", "a")
    return made


TEXTS = [
    "a" * 60,
    " " * 60,
    "ᾂ" * 9,
    unicodedata.normalize("NFD", "ᾂ") * 30,
    "x́" * 40,
    "日本語🥊" * 12,
    "\u0301" * 50,
]


@pytest.mark.parametrize("make", [byte_level, by_bytes, composing, collapsing])
def test_no_text_has_more_characters_than_its_tokens_can_stand_for(make: Any) -> None:
    made = make()
    longest = longest_token(json.loads(made.to_str()))
    assert longest is not None
    draw = random.Random(0)
    mixed = ["".join(draw.choices("".join(TEXTS), k=100)) for _ in range(200)]
    for text in TEXTS + mixed:
        assert len(text) <= longest * len(made.encode(text).ids), text


def strips() -> tokenizers.Tokenizer:
    made = byte_level()
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    return made


def drops_spaces() -> tokenizers.Tokenizer:
    made = bpe({**BYTES}, [], byte_fallback=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits()])
    return made


def removes() -> tokenizers.Tokenizer:
    made = bpe(BYTES, [], byte_fallback=True)
    made.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return made


def swallows() -> tokenizers.Tokenizer:
    """As Phi-3's: a special token takes the white space after it."""
    made = byte_level()
    made.add_special_tokens([tokenizers.AddedToken("<|end|>", rstrip=True)])
    return made


def fuses() -> tokenizers.Tokenizer:
    return bpe({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True)


def forgets() -> tokenizers.Tokenizer:
    return bpe({"a": 0}, [])


def whole_words() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))


@pytest.mark.parametrize("make", [strips, drops_spaces, removes, swallows, fuses, forgets, whole_words])
def test_a_tokenizer_that_leaves_characters_out_has_no_longest_token(make: Any) -> None:
    made = make()
    assert longest_token(json.loads(made.to_str())) is None
    text = {swallows: "<|end|>" + " " * 500, fuses: "é" * 500, whole_words: "b" * 500}.get(make, " " * 500)
    assert len(made.encode(text).ids) <= 1  # which no number of characters for each token explains


def test_what_cannot_fit_is_refused_before_it_is_tokenized(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[int] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer,
        "encode",
        lambda self, text, *, special=True: (
            tokenized.append(len(text)) or encode(self, text, special=special)
        ),
    )
    model = server.service.model
    assert model is not None
    assert model.tokenizer.longest is not None
    characters = model.tokenizer.longest * CONTEXT + 1
    server.service.reader._limits = Limits(read_here_bytes=1 << 22)  # pyright: ignore[reportPrivateUsage]
    try:
        for path, body in {
            "completions": {"prompt": "a" * characters},
            "chat/completions": {"messages": [{"role": "user", "content": "a" * characters}]},
            "responses": {"input": "a" * characters},
        }.items():
            response = http.post(f"/v1/{path}", json=body)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"
            assert f"are at least {CONTEXT + 1} tokens" in response.json()["error"]["message"]
    finally:
        server.service.reader._limits = server.service.limits  # pyright: ignore[reportPrivateUsage]
    assert tokenized == []


def _lists(schema: Any) -> Iterator[dict[str, Any]]:
    """The schemas of all lists of known elements within a core schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for value in schema.values():
            yield from _lists(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from _lists(value)


BODIES = [op.body for op in OPERATIONS if op.body]


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_every_list_has_a_longest_length_and_ends_with_its_first_fault(kind: type[BaseModel]) -> None:
    for schema in _lists(kind.__pydantic_core_schema__):
        assert schema.get("max_length") is not None, schema
        assert schema.get("fail_fast"), schema


def test_bodies_without_a_list_are_these() -> None:
    bodies = {kind.__name__ for kind in BODIES if not any(_lists(kind.__pydantic_core_schema__))}
    assert bodies == {
        "AbortRequest",
        "BatchRequest",
        "ContinueRequest",
        "FileRequest",
        "FlushCacheRequest",
        "ImageRequest",
        "LoadAdapterRequest",
        "NameWeightsRequest",
        "PauseRequest",
        "UnloadAdapterRequest",
        "UpdateWeightsRequest",
    }


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (DetokenizeRequest, {"tokens": [-1] * 5000}),
        (CompletionRequest, {"prompt": "x", **{f"a{place}": 0 for place in range(5000)}}),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": [-1] * 5000}),
        (CompletionRequest, {"prompt": "x", "logit_bias": {f"a{i}": 0 for i in range(LOGIT_BIASES + 1)}}),
        (ChatRequest, {"messages": [{"role": "user", **{f"a{place}": 0 for place in range(5000)}}]}),
        (ChatRequest, {"messages": [{"role": "robot"}] * 2000}),
    ],
)
def test_the_first_fault_ends_the_reading(kind: type[BaseModel], data: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(data)
    assert caught.value.error_count() == 1


def test_nesting_is_bounded() -> None:
    def body(depth: int) -> bytes:
        schema = b'{"a":' * depth + b"1" + b"}" * depth
        return b'{"prompt": "x", "structured_outputs": {"json": ' + schema + b"}}"

    parse(CompletionRequest, body(NESTING - 2))
    with pytest.raises(ApiError, match=f"more than {NESTING} deep"):
        parse(CompletionRequest, body(NESTING - 1))
    with pytest.raises(ApiError, match=f"more than {NESTING} deep"):
        parse(CompletionRequest, body(500_000))


LONG = {"role": "user", "content": "word " * 500}
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["word " * 300, "é" * 200], "max_tokens": 4, "n": 2, "echo": True}),
        ("/v1/completions", {"prompt": [5, 6, 7] * 100, "max_tokens": 4, "logit_bias": {"5": 1.5}}),
        ("/v1/chat/completions", {"messages": [LONG], "max_tokens": 4, "stop": ["zz"], "seed": 3}),
        (
            "/v1/chat/completions",
            {"messages": [LONG], "max_tokens": 4, "tools": [{"type": "function", "function": FUNCTION}]},
        ),
        (
            "/v1/responses",
            {"input": [LONG], "instructions": "Be brief.", "tools": [{"type": "function", **FUNCTION}]},
        ),
        ("/tokenize", {"prompt": "word é " * 400, "return_token_strs": True}),
        ("/tokenize", {"messages": [LONG]}),
        ("/detokenize", {"tokens": [5, 6, 7] * 100}),
        ("/v1/completions", {"prompt": "word " * 4000}),
        ("/v1/completions", {"prompt": "word " * 400, "model": "other"}),
        ("/v1/completions", {"prompt": "word " * 400, "model": 5}),
        ("/v1/completions", {"prompt": [4096] * 500}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/chat/completions", {"messages": [LONG], "chat_template_kwargs": {"messages": []}}),
        ("/detokenize", {"tokens": [5, 4096] * 100}),
    ],
)
def test_a_body_that_is_read_apart_is_answered_alike(
    server: Running, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    reader, answers = server.service.reader, []
    for here in (1 << 20, 0):
        reader._limits = Limits(read_here_bytes=here)  # pyright: ignore[reportPrivateUsage]
        response = http.post(path, json=body)
        answers.append((response.status_code, _settled(response.json())))
    reader._limits = server.service.limits  # pyright: ignore[reportPrivateUsage]
    assert answers[0] == answers[1]


def _settled(answer: Any) -> Any:
    """Without what differs between any two answers."""
    if isinstance(answer, dict):
        return {
            key: _settled(value)
            for key, value in answer.items()
            if key not in ("id", "created_at", "completed_at", "created")
        }
    return [_settled(item) for item in answer] if isinstance(answer, list) else answer


def test_a_long_text_is_not_tokenized_in_the_http_process(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(self: Tokenizer, text: str, *, special: bool = True) -> list[int]:
        raise AssertionError("tokenized in the HTTP process")

    monkeypatch.setattr(Tokenizer, "encode", here)
    characters = server.service.limits.read_here_bytes
    for path, body in {
        "/v1/completions": {"prompt": "word " * (characters // 5)},
        "/tokenize": {"prompt": "word " * (characters // 5)},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}] * 800},
    }.items():
        assert http.post(path, json=body).status_code in (200, 400)


KEYS = {f"key {number}": number for number in range(300_000)}


@pytest.mark.plain("bias")
@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"chat_template_kwargs": KEYS}),
        ("/v1/chat/completions", {"metadata": KEYS}),
        ("/v1/chat/completions", KEYS),
        ("/v1/completions", {"prompt": "a", "logit_bias": KEYS}),
    ],
    ids=["variables", "metadata", "fields", "bias"],
)
def test_no_body_of_many_keys_is_parsed_in_the_http_process(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, more: dict[str, Any]
) -> None:
    """While one is parsed, `/health` and all other requests wait."""
    parsed: list[int] = []

    def seen(kind: Any, body: bytes) -> Any:
        parsed.append(len(body))
        return parse(kind, body)

    monkeypatch.setattr(reading, "parse", seen)
    asked = {"max_tokens": 1} | more
    if "chat" in path:
        asked["messages"] = [{"role": "user", "content": "a"}]
    assert http.post(path, json=asked).status_code in (200, 400)
    assert max(parsed, default=0) <= server.service.limits.read_here_bytes


@pytest.mark.plain("limits0-longer than 0.05 s of processor time")
@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(read_seconds=0.05), "longer than 0.05 s of processor time"),
        (Limits(read_memory_bytes=24 << 20), "more memory than 25165824 bytes"),
    ],
)
def test_reading_has_limits_of_time_and_memory(limits: Limits, words: str) -> None:
    with serving(limits=limits) as running, httpx.Client(base_url=running.url, timeout=60) as http:
        response = http.post("/tokenize", json={"prompt": "word é " * 400_000})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "request_limit"
        assert words in response.json()["error"]["message"]
        assert http.post("/tokenize", json={"prompt": "word " * 5000}).json()["count"] > 4000


@pytest.mark.slow
def test_long_bodies_wait_in_a_bounded_queue_and_take_bounded_memory() -> None:
    limits = Limits(reads_waiting=0)
    with serving(limits=limits) as running, httpx.Client(base_url=running.url, timeout=60) as http:
        response = http.post("/tokenize", json={"prompt": "word " * 5000})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert http.post("/tokenize", json={"prompt": "word"}).status_code == 200
    limits = Limits(bodies_bytes=100_000)
    with serving(limits=limits) as running, httpx.Client(base_url=running.url, timeout=60) as http:
        for _ in range(3):  # what is refused, and what is read, is given back
            assert http.post("/tokenize", json={"prompt": "word " * 30_000}).status_code == 429
            assert http.post("/tokenize", json={"prompt": "word " * 15_000}).status_code == 200


def _tokenize(text: str) -> ReadingJob:
    return ReadingJob(
        "TokenizeRequest", json.dumps({"prompt": text}).encode(), RequestLimits(("m",), CONTEXT, 4096)
    )


def test_a_job_that_nobody_waits_for_is_ended_and_slow_ones_wait_for_themselves() -> None:
    async def run() -> None:
        facts = [str(find(None).folder), True, 1 << 20, 1 << 24]
        workers = Workers("torchwright.serve.http.read_worker", facts, WorkLimits(seconds=60))
        slow = msgspec.msgpack.encode(_tokenize("word é " * 1_000_000))
        try:
            running = [asyncio.create_task(workers.run(slow)) for _ in range(4)]
            quick = await workers.run(msgspec.msgpack.encode(_tokenize("word")))  # behind all four
            assert b'"count":' in quick
            assert not any(task.done() for task in running)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            server = workers._process  # pyright: ignore[reportPrivateUsage]
            assert server is not None
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
            while children.read_text():
                await asyncio.sleep(0.01)
        finally:
            await workers.close()

    asyncio.run(run())


@pytest.mark.slow
def test_the_log_probabilities_of_prompts_are_bounded(server: Running, http: httpx.Client) -> None:
    most = server.service.limits.scored_values
    body = {"echo": True, "max_tokens": 0, "logprobs": 1}
    prompts = [[5] * 1024] * (most // 2048)
    assert http.post("/v1/completions", json={**body, "prompt": prompts}).status_code == 200
    refused = http.post("/v1/completions", json={**body, "prompt": [*prompts, [5]]})
    assert refused.status_code == 400
    assert f"at most {most} are sent" in refused.json()["error"]["message"]


def test_a_client_that_leaves_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: Workers, job: bytes, seconds: float, nice: int) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(Workers, "_fork", never)
    with serving() as running, httpx.Client(base_url=running.url) as http:
        workers = running.service.reader.workers
        for path in ("/tokenize", "/v1/completions"):
            with pytest.raises(httpx.ReadTimeout):
                http.post(path, json={"prompt": "word " * 5000}, timeout=0.2)
            wait_until(lambda: workers._waiting == 0)  # pyright: ignore[reportPrivateUsage]
