"""The server against a fake engine: what clients get, how requests end, and what happens when things go wrong."""

from __future__ import annotations

import base64
import contextlib
import html
import json
import logging
import re
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import h11
import httpx
import pytest
from http_support import CONTEXT, LOADING, MODEL, NEVER, Running, Trouble, fake_command, serving, wait_until

from torchwright.serve.http.app import OPERATIONS
from torchwright.serve.limits import Limits

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def named() -> Iterator[Running]:
    with serving(hosts=["*.Example.com"]) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def events(text: str) -> list[dict[str, Any]]:
    """The data of server-sent events, but for the mark of the end."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def error(response: httpx.Response) -> dict[str, Any]:
    found = response.json()
    assert found.keys() == {"type", "error"}
    assert found["type"] == "error"  # Anthropic's clients look for it
    assert found["error"].keys() == {"message", "type", "param", "code"}
    return found["error"]


def ids(http: httpx.Client, text: str) -> list[int]:
    return http.post("/tokenize", json={"prompt": text}).json()["tokens"]


def test_a_completion_counts_and_says_why_it_ended(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 5}).json()
    prompt = ids(http, PROMPT)
    assert (
        answer["choices"][0]["text"]
        == http.post("/detokenize", json={"tokens": prompt[1:6]}).json()["prompt"]
    )
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 5,
        "total_tokens": len(prompt) + 5,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_streamed_and_whole_answers_are_the_same(http: httpx.Client) -> None:
    body = {"prompt": [PROMPT, "Zwölf Boxkämpfer 🥊 jagen"], "max_tokens": 30, "n": 2, "stop": ["foxThe q"]}
    whole = http.post("/v1/completions", json=body).json()
    chunks = events(http.post("/v1/completions", json={**body, "stream": True}).text)
    texts, finishes = [""] * 4, [None] * 4
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            finishes[choice["index"]] = choice["finish_reason"] or finishes[choice["index"]]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert finishes == [choice["finish_reason"] for choice in whole["choices"]]
    assert finishes == ["stop", "stop", "length", "length"]


def test_a_stop_string_ends_the_text_before_it(server: Running, http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 500, "stop": ["brown"]}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "The quick "
    assert answer["choices"][0]["stop_reason"] == "brown"
    assert answer["usage"]["completion_tokens"] < 20
    wait_until(server.cancelled)


def test_min_tokens_looks_for_stop_strings_later(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "min_tokens": 12, "stop": ["quick"]}
    text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert "quick" in text


def test_stop_tokens_end_an_answer_and_are_no_text(http: httpx.Client) -> None:
    stop = ids(http, PROMPT)[3]
    for given, text in (([], None), ([stop], "")):
        body = {"prompt": PROMPT, "max_tokens": 6, "stop_token_ids": given}
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["finish_reason"] == ("stop" if given else "length")
        assert choice["stop_reason"] == (stop if given else None)
        assert text is None or len(choice["text"]) < len(PROMPT)


def test_echo_scores_the_prompt(http: httpx.Client) -> None:
    prompt = ids(http, PROMPT)
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == PROMPT
    assert len(choice["logprobs"]["tokens"]) == len(prompt)
    assert choice["logprobs"]["token_logprobs"] == [None, *[-1.0] * (len(prompt) - 1)]
    body = {"prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 1}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"][-2:] == [-0.5, -0.5]
    assert "".join(choice["logprobs"]["tokens"][1:]) == choice["text"]


def test_chat_streams_roles_pieces_usage_and_timing(http: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "timing": True,
    }
    response = http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    first, *middle, last = events(response.text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert middle[-1]["choices"][0]["finish_reason"] == "length"
    scores = [score for chunk in middle for score in chunk["choices"][0]["logprobs"]["content"]]
    assert [len(score["top_logprobs"]) for score in scores] == [2] * 4
    assert bytes(scores[0]["bytes"]).decode() == scores[0]["token"]
    assert last["usage"]["completion_tokens"] == 4
    assert last["timing"]["choices"][0]["queue_s"] == 0.1
    assert last["timing"]["choices"][0]["prefix"] == {"cache_tokens": 3, "computed_tokens": 5}


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions"])
def test_every_event_counts_where_it_is_asked_for(http: httpx.Client, url: str) -> None:
    """vLLM's name for it, which load generators send."""
    asked = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in url else {"prompt": PROMPT}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**asked, "max_tokens": 4, "stream": True, "stream_options": options}
    counted = [chunk["usage"]["completion_tokens"] for chunk in events(http.post(url, json=body).text)]
    assert len(counted) >= 4
    assert counted == sorted(counted)
    assert counted[-1] == 4
    alone = {**body, "stream_options": {"continuous_usage_stats": True}}
    assert not any("usage" in chunk for chunk in events(http.post(url, json=alone).text))


def test_timing_is_given_by_the_header_too(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    assert "timing" not in http.post("/v1/completions", json=body).json()
    headers = {"X-Torchwright-Timing": "1"}
    timing = http.post("/v1/completions", json=body, headers=headers).json()["timing"]
    assert timing.keys() == {"tokenize_s", "grammar_compile_s", "total_s", "choices"}


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def test_calls_are_read_from_the_text(http: httpx.Client) -> None:
    # The fake repeats its prompt, and the prompt has a call in it.
    body = {"messages": [{"role": "system", "content": CALL}], "tools": TOOLS, "max_tokens": 250}
    whole = http.post("/v1/chat/completions", json={**body, "parallel_tool_calls": False}).json()["choices"][
        0
    ]
    assert [call["function"] for call in whole["message"]["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1}'}
    ]
    assert whole["finish_reason"] == "tool_calls"
    chunks = events(http.post("/v1/chat/completions", json={**body, "stream": True}).text)
    calls = [
        call
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", [])
    ]
    assert calls[0]["function"] == {"name": "add", "arguments": ""}
    arguments = "".join(call["function"]["arguments"] for call in calls if call["index"] == 0)
    assert arguments == '{"a": 1}'


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "ad\\q", "arguments": {"a": 1}}',
        '{"arguments": {"a": "\\ud800"}, "name": "add"}',
    ],
    ids=["a bad escape", "half a surrogate pair"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_no_json_is_text(http: httpx.Client, call: str, stream: bool) -> None:
    text = f"<tool_call>\n{call}\n</tool_call>"
    body = {"messages": [{"role": "system", "content": text}], "tools": TOOLS, "max_tokens": 200}
    response = http.post("/v1/chat/completions", json={**body, "stream": stream})
    assert response.status_code == 200, response.text
    if stream:
        assert response.text.endswith("data: [DONE]\n\n")
        deltas = [choice["delta"] for event in events(response.text) for choice in event["choices"]]
        content = "".join(delta.get("content", "") for delta in deltas)
    else:
        content = response.json()["choices"][0]["message"]["content"]
    assert text in content


def test_arguments_that_no_prompt_can_hold_stay_text(http: httpx.Client) -> None:
    """Half a surrogate pair, as a model may write it and a client sends it back."""
    function = {"name": "add", "arguments": '{"a": "\\ud800"}'}
    called = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "1"}
    body = {"messages": [called, result], "max_tokens": 200}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert "ud800" in response.json()["choices"][0]["message"]["content"]


def test_without_tools_a_call_is_text(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": CALL}], "max_tokens": 60}
    message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert "tool_calls" not in message
    assert "<tool_call>" in message["content"]


def test_responses_names_every_change(http: httpx.Client) -> None:
    body = {"input": PROMPT, "max_output_tokens": 6, "instructions": "Be brief.", "stream": True}
    found = events(http.post("/v1/responses", json=body).text)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"] for event in found]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    final = found[-1]["response"]
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["usage"]["output_tokens"] == 6
    deltas = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
    assert final["output"][0]["content"][0]["text"] == deltas
    whole = http.post("/v1/responses", json={**body, "stream": False}).json()
    assert whole["output"][0]["content"] == final["output"][0]["content"]


def test_responses_takes_a_conversation_with_calls(http: httpx.Client) -> None:
    items = [
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
    ]
    body = {"input": items, "max_output_tokens": 400, "tools": [{"type": "function", "name": "add"}]}
    answer = http.post("/v1/responses", json=body).json()
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    assert calls[0]["arguments"] == '{"a": 1}'
    assert calls[0]["status"] == "completed"


def test_what_is_asked_of_the_server_itself(http: httpx.Client) -> None:
    assert http.get("/health").json()["status"] == "ready"
    assert http.get("/ready").json()["ready"] is True
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [MODEL]
    assert http.get(f"/v1/models/{MODEL}").json()["max_model_len"] == CONTEXT
    assert error(http.get("/v1/models/other"))["code"] == "model_not_found"
    page = http.get("/")
    assert page.status_code == 200
    assert "script-src" in page.headers["content-security-policy"]
    assert "http://" not in page.text.replace("http://www.w3.org", "")
    assert "https://" not in page.text


def test_metrics_have_the_known_names(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3})
    text = http.get("/metrics").text
    for name in (
        "num_requests_running",
        "engine_core_share",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens_total",
        "generation_tokens_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
    ):
        assert f'torchwright:{name}{{model_name="{MODEL}"}} ' in text, name
    assert 'finished_reason="length"' in text


def test_docs_is_a_page_of_the_document_that_loads_nothing(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["x-content-type-options"] == "nosniff"
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "script-src" not in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.search(r"<script|<img|<iframe|\ssrc=|https?:", page.text)
    shown = html.unescape(page.text)
    document = http.get("/openapi.json").json()
    assert json.loads(re.search(r"<pre>(.*?)</pre>", shown, re.DOTALL)[1]) == document  # type: ignore[index]
    assert all(f"<code>{path}</code>" in shown for path in document["paths"])
    assert all(
        f"<td>{field}</td>" in shown
        for field in document["components"]["schemas"]["ChatRequest"]["properties"]
    )


def test_openapi_names_every_field(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert all("description" in field for field in chat["properties"].values())


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not valid JSON"),
        (b"", 400, "not valid JSON"),
        (b'{"prompt": "\xff"}', 400, "not valid JSON: 'utf-8'"),
        (b'{"prompt": "\\ud800"}', 400, "JSON"),
        (b"[" * 100_000, 400, "more than 128 deep"),
        (b"[]", 400, "object"),
        (b"{}", 400, "'prompt' is missing"),
        (b'{"prompt": 1}', 400, "prompt"),
        (b'{"prompt": []}', 400, "prompt"),
        (b'{"prompt": [1, "a"]}', 400, "prompt"),
        (b'{"prompt": [5000]}', 400, "token id 5000 is out of range"),
        (b'{"prompt": "x", "max_tokens": "5"}', 400, "max_tokens"),
        (b'{"prompt": "x", "max_tokens": -1}', 400, "max_tokens"),
        (b'{"prompt": "x", "max_tokens": true}', 400, "max_tokens"),
        (b'{"prompt": "x", "temperature": NaN}', 400, "not valid JSON"),
        (b'{"prompt": "x", "temperature": 1e999}', 400, "out of range"),
        (b'{"prompt": "x", "n": 1000}', 400, "'n'"),
        (b'{"prompt": "x", "stop": [""]}', 400, "stop"),
        (b'{"prompt": "x", "logit_bias": {"9999": 1}}', 400, "9999"),
        (b'{"prompt": "x", "logit_bias": {"a": 1}}', 400, "logit_bias"),
        (b'{"prompt": "x", "best_of": 2}', 400, "'best_of' is not supported"),
        (b'{"prompt": "x", "zzz": 2}', 400, "'zzz' is not supported"),
        (b'{"prompt": "x", "guided_regex": "a"}', 400, "structured_outputs"),
        (b'{"prompt": "x", "stream_options": {}}', 400, "stream_options"),
        (b'{"prompt": "x", "min_tokens": 50}', 400, "min_tokens"),
        (b'{"prompt": "x", "model": "other"}', 404, "there is no model 'other'"),
        (b'{"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["b"]}}', 400, "give one of"),
        (b'{"prompt": "x", "seed": 9223372036854775808}', 400, "seed"),
    ],
)
def test_what_is_wrong_is_refused_by_name(http: httpx.Client, body: bytes, status: int, words: str) -> None:
    response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    assert words in error(response)["message"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"modalities": ["text", "audio"]}, "'modalities' is not supported"),
        ({"audio": {}}, "'audio' is not supported"),
        ({"store": True}, "store"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "content part 'image_url' is not supported",
        ),
        ({"tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "not in tools"),
        ({"tools": TOOLS * 2}, "same name"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "differ"),
        ({"chat_template_kwargs": {"messages": []}}, "cannot set messages"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"max_tokens": CONTEXT}, f"the model's context is {CONTEXT} tokens"),
    ],
)
def test_a_chat_request_is_refused_by_name(http: httpx.Client, change: dict[str, Any], words: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **change}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert words in error(response)["message"]


def test_a_prompt_over_the_context_is_refused_with_the_numbers(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": [5] * CONTEXT, "max_tokens": 3})
    assert response.status_code == 400
    found = error(response)
    assert found["code"] == "context_length_exceeded"
    assert (
        f"{CONTEXT} tokens here; the prompt has {CONTEXT} and max_tokens is 3, which is 3 too many"
        in found["message"]
    )


def test_paths_methods_and_content_types(http: httpx.Client) -> None:
    assert error(http.get("/nope"))["type"] == "not_found_error"
    assert http.get("/nope").status_code == 404
    assert http.get("/v1/completions").status_code == 405
    wrong = http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert wrong.status_code == 415
    assert "application/json" in error(wrong)["message"]


def test_a_body_of_100_mb_is_a_413(http: httpx.Client) -> None:
    def body() -> Iterator[bytes]:
        yield from [b"x" * 1_000_000] * 100

    headers = {"content-type": "application/json"}
    response = http.post("/v1/completions", content=body(), headers=headers)
    assert response.status_code == 413
    assert "8388608 bytes" in error(response)["message"]


def test_a_full_queue_is_a_429_with_retry_after(http: httpx.Client) -> None:
    for stream in (False, True):
        body = {"prompt": PROMPT, "priority": Trouble.FULL, "stream": stream}
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "7"
        assert error(response)["code"] == "queue_full"


def test_an_engine_fault_is_a_500_that_says_so(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": PROMPT, "priority": Trouble.FAIL})
    assert response.status_code == 500
    assert error(response)["message"] == "a fault"


def test_a_grammar_that_is_too_slow_to_follow_is_a_400(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": PROMPT, "priority": Trouble.SLOW_GRAMMAR})
    assert response.status_code == 400
    assert error(response)["code"] == "grammar_limit"


def test_a_client_that_leaves_is_cancelled_at_once(server: Running, http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 900, "priority": Trouble.SLOW}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, timeout=0.2)
    wait_until(server.cancelled)
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        lines = response.iter_lines()  # kept: collecting the iterator closes the connection
        next(lines)
        assert not server.cancelled()
    wait_until(server.cancelled)


def test_a_slow_reader_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "torchwright.serve")
    with serving(limits=Limits(unread_seconds=0.3)) as running:
        address = running.url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((address[0], int(address[1])))
            body = json.dumps({"prompt": PROMPT, "n": 64, "max_tokens": 900, "stream": True}).encode()
            head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            head = f"POST /v1/completions HTTP/1.1\r\n{head}"
            client.sendall(head.encode() + body)
            wait_until(lambda: "slow reader" in caplog.text)
            wait_until(running.cancelled)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_outputs_do_not_pile_up_for_a_client(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "torchwright.serve")
    with serving(limits=Limits(unread_outputs=1)) as running, httpx.Client(base_url=running.url) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            http.post("/v1/completions", json={"prompt": PROMPT, "n": 64, "max_tokens": 900, "stream": True})
        wait_until(lambda: "slow reader" in caplog.text)


def test_the_key_is_asked_for_and_compared() -> None:
    with serving(keys=["right", "second"]) as running, httpx.Client(base_url=running.url) as http:
        assert http.get("/v1/models").status_code == 401
        missing = http.post("/v1/completions", json={"prompt": "x"})
        assert error(missing)["code"] == "invalid_api_key"
        assert missing.headers["www-authenticate"] == "Bearer"
        for given, status in {
            "Bearer wrong": 401,
            "Bearer second": 200,
            "bearer right": 200,  # the scheme is in any case (RFC 9110)
            "BEARER  right": 200,
            "Basic right": 401,
            "Bearer": 401,
        }.items():
            response = http.get("/v1/models", headers={"Authorization": given})
            assert response.status_code == status, given
        assert http.get("/metrics").status_code == 401
        assert [http.get(path).status_code for path in ("/", "/docs", "/health", "/ready")] == [200] * 4


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost:8000", None, 200),
        ("LOCALHOST.", None, 200),
        ("api.localhost", None, 200),
        ("127.0.0.1", None, 200),
        ("[::1]:8000", None, 200),
        ("192.0.2.7:8000", None, 200),  # an address belongs to nobody's page
        ("box.example.com", None, 200),
        ("evil.example", None, 403),
        ("evil.example:8000", "http://evil.example:8000", 403),
        ("localhost.evil.example", None, 403),
        ("127.0.0.1.evil.example", None, 403),
        ("localhost@evil.example", None, 403),
        ("[::1", None, 403),
        ("localhost:8000", "http://localhost:8000", 200),
        ("192.0.2.7:8000", "http://192.0.2.7:8000", 200),
        ("localhost:8000", "http://127.0.0.1:3000", 200),
        ("localhost:8000", "https://box.example.com", 200),
        ("localhost:8000", "https://evil.example", 403),
        ("localhost:8000", "http://192.0.2.7", 403),
        ("localhost:8000", "null", 403),
        ("localhost:8000", "http://[::1", 403),
    ],
)
def test_a_foreign_page_does_not_reach_a_server_without_a_key(
    named: Running, host: str, origin: str | None, status: int
) -> None:
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    with httpx.Client(base_url=named.url, headers=headers) as http:
        asked = [http.get("/"), http.get("/docs"), http.get("/health")]
        asked += [http.post("/v1/completions", json={"prompt": "x"})]
    assert [response.status_code for response in asked] == [status] * 4
    if status == 403:
        assert error(asked[0])["code"] == "host_not_allowed"
        assert "--allowed-host" in error(asked[0])["message"]


def test_with_a_key_any_name_will_do() -> None:
    """A page has no key, and a server that others reach has names that it does not know."""
    headers = {"host": "gateway.example", "origin": "https://gateway.example", "authorization": "Bearer k"}
    with serving(keys=["k"]) as running:
        assert httpx.get(running.url + "/v1/models", headers=headers).status_code == 200


def test_the_engines_death_is_a_503_and_it_is_restarted(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as running, httpx.Client(base_url=running.url, timeout=30) as http:
        client = running.service.client
        slow = {"prompt": PROMPT, "max_tokens": 900, "priority": Trouble.SLOW}
        with ThreadPoolExecutor(4) as pool:
            whole = [pool.submit(http.post, "/v1/completions", json=slow) for _ in range(2)]
            streamed = pool.submit(http.post, "/v1/completions", json={**slow, "stream": True})
            wait_until(lambda: client.waiting == 3)
            wait_until(lambda: client.stats is not None and client.stats.running == 3)
            died = http.post("/v1/completions", json={"prompt": PROMPT, "priority": Trouble.DIE})
            for response in (died, *(job.result() for job in whole)):
                assert response.status_code == 503
                assert "the engine died (exit code 3)" in error(response)["message"]
                assert response.headers["retry-after"] == "1"
            last = events(streamed.result().text)[-1]
            assert "the engine died" in last["error"]["message"]
        wait_until(lambda: client.state == "ready")
        assert http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}).status_code == 200
        assert client.restarts == 1
    assert "3 requests were waiting" in caplog.text or "4 requests were waiting" in caplog.text


def test_before_the_engine_is_ready_every_endpoint_says_so_at_once() -> None:
    with serving(kind="loading") as running, httpx.Client(base_url=running.url, timeout=30) as http:
        for operation in OPERATIONS:
            path = operation.path.replace("{model:path}", MODEL)
            response = http.request(operation.method, path, content=b"not even read")
            if path in ("/metrics", "/openapi.json"):
                assert response.status_code == 200
                continue
            assert response.status_code == 503, path
            assert response.headers["retry-after"] == "1"
            assert LOADING in response.text
        assert http.get("/").status_code == 200


def test_the_server_is_not_ready_while_its_engine_loads_again() -> None:
    body = {"prompt": PROMPT, "max_tokens": 2}
    with serving() as running, httpx.Client(base_url=running.url, timeout=30) as http:
        client = running.service.client
        client._launcher._argv = fake_command("loading")
        client.kill()
        wait_until(lambda: client.detail == LOADING)
        for response in (http.get("/ready"), http.get("/health"), http.post("/v1/completions", json=body)):
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        client._launcher._argv = fake_command("decoder")
        client.kill()
        wait_until(lambda: http.get("/ready").status_code == 200)
        assert http.get("/health").json()["status"] == "ready"
        assert http.post("/v1/completions", json=body).status_code == 200


def test_an_engine_that_hangs_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torchwright.serve.wire.client.SILENT_SECONDS", 0.4)
    with serving() as running, httpx.Client(base_url=running.url, timeout=30) as http:
        response = http.post("/v1/completions", json={"prompt": PROMPT, "priority": Trouble.HANG})
        assert response.status_code == 503
        assert "SIGKILL" in error(response)["message"]
        wait_until(lambda: http.get("/ready").status_code == 200)
    assert "has said nothing" in caplog.text


def test_an_engine_that_cannot_live_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchwright.serve.wire.client.BACKOFF_SECONDS", (0.01,))
    monkeypatch.setattr("torchwright.serve.http.server.Server._announce", _silent)
    with serving(kind="broken") as running, httpx.Client(base_url=running.url) as http:
        health = http.get("/health")
        assert health.status_code == 503
        assert "died 4 times in a row (exit code 4)" in health.json()["detail"]
        assert http.get("/ready").status_code == 503
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503


async def _silent(server: object) -> None:
    """The command would end where an engine was never ready; here its last words are read."""


def test_an_encoder_embeds_and_writes_nothing() -> None:
    with serving(kind="encoder") as running, httpx.Client(base_url=running.url) as http:
        found = http.post("/v1/embeddings", json={"input": ["a", "bcd"]}).json()
        assert [row["embedding"] for row in found["data"]] == [[1.0, 0.5], [3.0, 0.5]]
        assert found["usage"]["prompt_tokens"] == 4
        packed = http.post("/v1/embeddings", json={"input": "ab", "encoding_format": "base64"}).json()
        raw = base64.b64decode(packed["data"][0]["embedding"])
        assert struct.unpack("<2f", raw) == (2.0, 0.5)
        refused = http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 400
        assert "/v1/embeddings" in error(refused)["message"]
        assert (
            "'dimensions' is not supported"
            in error(http.post("/v1/embeddings", json={"input": "x", "dimensions": 3}))["message"]
        )


def test_a_client_that_leaves_its_embeddings_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    with serving(kind="encoder") as running, httpx.Client(base_url=running.url) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/embeddings", json={"input": ["a", NEVER]}, timeout=0.2)
        wait_until(running.cancelled)
        wait_until(lambda: "499, client disconnected" in caplog.text)


def test_connections_and_headers_are_bounded() -> None:
    limits = Limits(connections=3, header_seconds=0.2)
    with serving(limits=limits) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"GET /health HT")
            slow.settimeout(10)
            assert b" 408 " in slow.recv(4096)
        with socket.create_connection((host, int(port))) as garbage:
            garbage.sendall(b"\x16\x03\x01\x00\xa5 nonsense\r\n\r\n")
            garbage.settimeout(10)
            answer = garbage.recv(4096)
            assert b" 400 " in answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
        wait_until(lambda: _refused(host, int(port)))


def test_chunks_of_a_few_bytes_are_not_read_one_by_one(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    next_event = h11.Connection.next_event
    monkeypatch.setattr(
        h11.Connection, "next_event", lambda self: read.append(found := next_event(self)) or found
    )
    host, port = server.url.removeprefix("http://").split(":")
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            client.sendall(b"1\r\n \r\n" * 20_000)
        client.settimeout(10)
        answer = (
            b""  # which a reset may take with it: as an error here, or as the end after one that sendall met
        )
        with contextlib.suppress(ConnectionError):
            answer = client.recv(4096)
    assert not answer or b" 400 " in answer
    assert len(read) < 10_000


def _refused(host: str, port: int) -> bool:
    """Whether the fourth of four connections is refused."""
    sockets = [socket.create_connection((host, port)) for _ in range(4)]
    try:
        sockets[-1].settimeout(10)
        return b" 503 " in sockets[-1].recv(4096)
    finally:
        for connection in sockets:
            connection.close()


def test_threads_end_with_their_servers() -> None:
    before = threading.active_count()
    with serving():
        pass
    wait_until(lambda: threading.active_count() <= before)
