"""Outside clients against `torchwright serve` on the bundled model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import openai
import pytest
from http_support import MODEL, Command, command, wait_until
from pydantic import BaseModel

from torchwright import cli

PROMPT = "The :mod:`json` module provides"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "minimum": 0, "maximum": 9},
                    "sign": {"enum": ["+", "-"]},
                },
                "required": ["a", "sign"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def server(bundled_server: Callable[[], Command]) -> Command:
    return bundled_server()


@pytest.fixture(scope="module")
def client(server: Command) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: Command) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http:
        yield http


class Point(BaseModel):
    kind: bool
    mark: Literal["cross", "dot"]


def test_the_preflight_and_the_address_are_said(server: Command) -> None:
    said = "".join(server.said)
    assert "weights    about" in said
    assert "requests of that length fit at once" in said
    assert f"serving '{MODEL}' at {server.url}" in said


@pytest.mark.quick
def test_completions_are_the_same_whole_streamed_and_async(server: Command, client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 5}
    whole = client.completions.create(**asked).choices[0].text
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))

    async def concurrently() -> list[str]:
        url = server.url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            found = await asyncio.gather(*(client.completions.create(**asked) for _ in range(8)))
        return [answer.choices[0].text for answer in found]

    assert len(whole) > 20
    assert [streamed, *asyncio.run(concurrently())] == [whole] * 9


def test_a_seed_is_drawn_where_none_is_given(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 1.5, "n": 2}
    first, second = (client.completions.create(**asked) for _ in range(2))
    assert len({choice.text for answer in (first, second) for choice in answer.choices}) == 4


@pytest.mark.quick
def test_a_chat_reports_usage_and_cached_tokens(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Describe the module. " * 20}]
    asked: Any = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0}
    client.chat.completions.create(**asked)
    again = client.chat.completions.create(**asked, extra_body={"timing": True})
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 64
    timing = (again.model_extra or {})["timing"]["choices"][0]
    assert timing["prefix"]["cache_tokens"] == again.usage.prompt_tokens_details.cached_tokens
    assert timing["prefill_s"] > 0
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].usage == again.usage
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == again.choices[0].message.content


def test_scores_are_log_probabilities(client: openai.OpenAI) -> None:
    echoed = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=3)
    scores = echoed.choices[0].logprobs
    assert scores is not None
    assert scores.token_logprobs is not None
    assert scores.top_logprobs is not None
    assert scores.token_logprobs[0] is None
    assert all(score < 0 for score in scores.token_logprobs[1:])
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "x"}],
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content or []
    assert [score.token for score in content] == [score.top_logprobs[0].token for score in content]


def test_an_answer_is_parsed_into_a_class(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "A point"}]
    parsed = client.chat.completions.parse(
        model=MODEL, messages=messages, response_format=Point, seed=1, max_tokens=400, temperature=1.0
    )
    assert isinstance(parsed.choices[0].message.parsed, Point)
    response = client.responses.parse(model=MODEL, input="A point", text_format=Point, max_output_tokens=400)
    assert isinstance(response.output_parsed, Point)


@pytest.mark.parametrize(
    ("form", "allowed"),
    [
        ({"regex": "[a-f]{3}-[0-9]{2}"}, lambda text: text[3] == "-" and text[4:].isdigit()),
        ({"choice": ["yes", 'no "é"']}, lambda text: text in ("yes", 'no "é"')),
        ({"grammar": 'root ::= "a" ("b" | "c") "d"'}, lambda text: text in ("abd", "acd")),
        ({"json": {"enum": [1, "two"]}}, lambda text: json.loads(text) in (1, "two")),
    ],
)
def test_structured_outputs_are_enforced(client: openai.OpenAI, form: dict[str, Any], allowed: Any) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="x", max_tokens=40, n=3, extra_body={"structured_outputs": form}
    )
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    assert all(allowed(choice.text) for choice in answer.choices)


LARK = 'start: "a" MIDDLE "d"\nMIDDLE: /[bc]/'
"""A grammar in Lark's syntax; guidance sends one under both of vLLM's names."""


@pytest.mark.parametrize(
    ("body", "allowed"),
    [
        ({"guided_regex": "[a-f]{3}"}, lambda text: len(text) == 3),
        ({"regex": "[a-f]{3}"}, lambda text: len(text) == 3),
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"guided_json": {"enum": [1, 2]}}, lambda text: text in ("1", "2")),
        ({"guided_json": '{"enum": [1, 2]}'}, lambda text: text in ("1", "2")),
        ({"ebnf": 'root ::= "a" ("b" | "c")'}, lambda text: text in ("ab", "ac")),
        (
            {
                "guided_grammar": LARK,
                "structured_outputs": {"grammar": LARK},
                "guided_decoding_backend": "guidance",
            },
            lambda text: text in ("abd", "acd"),
        ),
    ],
)
def test_forms_have_the_names_of_other_servers(
    client: openai.OpenAI, body: dict[str, Any], allowed: Any
) -> None:
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=40, extra_body=body)
    assert answer.choices[0].finish_reason == "stop"
    assert allowed(answer.choices[0].text)


def test_tools_are_called_and_their_arguments_streamed(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "add"}]
    asked: Any = {"model": MODEL, "messages": messages, "tools": TOOLS, "seed": 3, "max_tokens": 300}
    whole = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False)
    (call,) = whole.choices[0].message.tool_calls or []
    assert whole.choices[0].finish_reason == "tool_calls"
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert arguments["sign"] in ("+", "-")
    named: Any = {"type": "function", "function": {"name": "add"}}
    with client.chat.completions.stream(**asked, tool_choice=named) as stream:
        deltas = [
            event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"
        ]
        final = stream.get_final_completion().choices[0].message.tool_calls or []
    assert len(deltas) > 3
    assert json.loads("".join(deltas)) == json.loads(final[0].function.arguments)


def test_responses_stream_to_their_end(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **TOOLS[0]["function"], "strict": True}
    with client.responses.stream(
        model=MODEL, input="add", tools=[tool], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        kinds = [event.type for event in stream]
        output = stream.get_final_response().output
    assert kinds[-1] == "response.completed"
    assert "response.function_call_arguments.delta" in kinds
    assert output[0].type == "function_call"
    assert json.loads(output[0].arguments)["sign"] in ("+", "-")
    plain = client.responses.create(model=MODEL, input="Hello", max_output_tokens=5, temperature=0)
    assert plain.status == "incomplete"
    assert plain.output_text


@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": 2.0},
        {"temperature": 2.0, "top_k": 50, "seed": 1},
        {"temperature": 2.0, "min_p": 0.01, "top_p": 0.95, "seed": 1},
        {"logit_bias": {str(token): -100 for token in range(200, 1000)}},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"max_tokens": 5},
    ],
)
def test_options_change_the_answer(http: httpx.Client, change: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    plain, changed = (http.post("/v1/completions", json={**body, **more}).json() for more in ({}, change))
    assert changed["choices"][0]["text"] != plain["choices"][0]["text"]


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"regex": "((((a{0,30}b?){0,30}c?){0,30}d?){0,300}){0,300}"}, "cannot be used"),
        ({"regex": "["}, "Unclosed"),
        ({"json": {"$ref": "#"}}, "#: a \\$ref that leads back to itself"),
        ({"json": {"type": "nonsense"}}, "nonsense"),
        ({"json": {"type": "array", "uniqueItems": True}}, "#/uniqueItems: it cannot be enforced"),
        (
            {
                "json": {
                    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                    "$ref": "#/$defs/a",
                }
            },
            "#/\\$defs/a: a \\$ref that leads back to itself",
        ),
        ({"grammar": "root ::= other"}, "other"),
        ({"regex": "a" * 70_000}, "70000 bytes"),
    ],
)
def test_grammars_that_cannot_be_used_are_refused(
    http: httpx.Client, form: dict[str, Any], words: str
) -> None:
    begun = time.monotonic()
    response = http.post("/v1/completions", json={"prompt": "x", "structured_outputs": form})
    assert response.status_code == 400, response.text
    assert re.search(words, response.json()["error"]["message"])
    assert time.monotonic() - begun < 30
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_errors_are_the_clients_own_classes(client: openai.OpenAI, server: Command) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError, match="1024 tokens here; the prompt has"):
        client.completions.create(model=MODEL, prompt="word " * 2000)
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as wrong,
        pytest.raises(openai.AuthenticationError, match="wrong"),
    ):
        wrong.models.list()


def test_two_hundred_clients_that_leave_free_their_pages(server: Command, http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 900, "stream": True, "ignore_eos": True}

    def leave(place: int) -> None:
        with http.stream("POST", "/v1/completions", json={**body, "seed": place}) as response:
            lines = response.iter_lines()
            assert response.status_code == 200
            next(lines)

    with ThreadPoolExecutor(40) as pool:
        list(pool.map(leave, range(200)))
    wait_until(
        lambda: _metric(http, "num_requests_running") == 0 == _metric(http, "num_requests_waiting"), 60
    )
    assert _metric(http, "kv_cache_usage_perc") == 0


def test_a_batch_next_to_other_requests_gives_their_answers(client: openai.OpenAI) -> None:
    """By the real engine: rows behind a stream, and the same answers as of the path itself."""
    bodies: list[Any] = [
        {"model": MODEL, "prompt": f"{PROMPT} {place}", "max_tokens": 12, "temperature": 0.8, "seed": place}
        for place in range(6)
    ]
    rows = [
        {"custom_id": f"r{place}", "method": "POST", "url": "/v1/completions", "body": body}
        for place, body in enumerate(bodies)
    ]
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    stream = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=60, stream=True)
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    assert len(list(stream)) > 1
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 60)
    batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None
    found = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in found}
    assert texts == {
        f"r{place}": client.completions.create(**body).choices[0].text for place, body in enumerate(bodies)
    }


@pytest.mark.slow  # `test_http_trouble` kills a fake engine
def test_the_engine_is_killed_under_load_and_comes_back(server: Command, http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}
    before = _metric(http, "generation_tokens_total")
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(http.post, "/v1/completions", json=body) for _ in range(8)]
        wait_until(lambda: _metric(http, "num_requests_running") == 8)
        os.kill(server.engine_pid(), signal.SIGKILL)
        for job in jobs:
            assert job.result().status_code == 503
            assert "SIGKILL" in job.result().json()["error"]["message"]
    assert http.get("/health").json()["status"] in ("restarting", "ready")
    wait_until(lambda: http.get("/ready").status_code == 200, 60)
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert _metric(http, "generation_tokens_total") > before
    assert _metric(http, "engine_restarts_total") == 1


@pytest.mark.slow  # `test_process` refuses it in words, and in `test_wait_ready` an engine ends the command
def test_what_the_engine_cannot_load_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--port", "0", "--kv-memory", "1KiB"]) == 2
    said = capsys.readouterr()
    assert "1024 bytes for keys and values" in said.err
    assert "advice     not one request of 1024 tokens fits: --kv-memory 3MiB" in said.out


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once() -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True}
    url = "/v1/completions"
    with command() as running, httpx.stream("POST", running.url + url, json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGINT)
        wait_until(lambda: not _accepts(running.url))
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(20) == 0


def test_ctrl_c_drains(server: Command, http: httpx.Client) -> None:
    """The last test of the file, because it ends the server of the others."""
    body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGINT)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert server.process.wait(20) == 0


def _accepts(url: str) -> bool:
    try:
        return httpx.get(url + "/health").is_success
    except httpx.HTTPError:
        return False


def _metric(http: httpx.Client, name: str) -> float:
    text = http.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith(f"torchwright:{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
