"""Fields that clients send without meaning anything by them, and what their SDKs put into a message: all are taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_support import error, serving
from jsonschema import Draft202012Validator

from torchwright.serve.openai.anthropic_request import MessagesRequest
from torchwright.serve.openai.parse import REFUSED
from torchwright.serve.openai.protocol import HARMLESS, SPELLED_OUT, ChatRequest, CompletionRequest
from torchwright.serve.openai.responses import ResponsesRequest

IGNORED = "x-torchwright-ignored"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
CACHED = {"cache_control": {"type": "ephemeral"}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "12"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [USER], "max_tokens": 2},
}
KINDS = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serving() as running, httpx.Client(base_url=running.url, timeout=60) as client:
        yield client


def optional(path: str) -> list[str]:
    return [
        field.alias or name
        for name, field in KINDS[path].model_fields.items()
        if not field.is_required() and name not in BODIES[path]
    ]


@pytest.mark.parametrize("path", BODIES)
def test_null_is_a_field_left_out(http: httpx.Client, path: str) -> None:
    """All at once: every optional field, and every name of OpenAI's that is refused with another value."""
    nulls = dict.fromkeys([*optional(path), *HARMLESS, *SPELLED_OUT, *REFUSED])
    response = http.post(path, json=nulls | BODIES[path])
    assert response.status_code == 200, response.text
    assert IGNORED not in response.headers


@pytest.mark.parametrize("path", BODIES)
def test_defaults_spelled_out_are_taken_in_silence(http: httpx.Client, path: str) -> None:
    response = http.post(path, json={name: values[0] for name, values in SPELLED_OUT.items()} | BODIES[path])
    assert response.status_code == 200, response.text
    assert IGNORED not in response.headers


@pytest.mark.parametrize("path", BODIES)
def test_what_cannot_change_the_answer_is_taken_and_named(http: httpx.Client, path: str) -> None:
    fields: dict[str, Any] = {
        "metadata": {"user_id": "7"},
        "store": True,
        "prompt_cache_key": "k",
        "verbosity": "low",
    }
    response = http.post(path, json=fields | BODIES[path] | {"service_tier": "flex"})
    assert response.status_code == 200, response.text
    assert set(response.headers[IGNORED].split(", ")) >= {"store", "prompt_cache_key", "service_tier"}


def test_the_log_names_what_was_ignored_once(caplog: pytest.LogCaptureFixture) -> None:
    body = BODIES["/v1/completions"] | {"store": True}
    with serving() as running, caplog.at_level("INFO", "torchwright.serve"):
        for more in ({}, {"metadata": {"a": "b"}}, {}):
            assert (
                httpx.post(f"{running.url}/v1/completions", json=body | more, timeout=60).status_code == 200
            )
    said = [message for message in caplog.messages if "without effect" in message]
    assert [message.split()[0] for message in said] == ["'store'", "'metadata'"]


def test_a_long_request_names_what_was_ignored_too(http: httpx.Client) -> None:
    """It is read in another process."""
    padding = {"user_id": "x" * 70_000}
    response = http.post(
        "/v1/completions", json=BODIES["/v1/completions"] | {"store": True, "metadata": padding}
    )
    assert response.status_code == 200, response.text
    assert response.headers[IGNORED] == "store, metadata"


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/v1/chat/completions", {"modalities": ["text", "audio"]}, "'modalities' is not supported"),
        ("/v1/completions", {"best_of": 3}, "'best_of' is not supported: ask for n"),
        ("/v1/completions", {"suffix": "}"}, "'suffix' is not supported"),
        ("/v1/responses", {"truncation": "auto"}, "'truncation' is not supported"),
        ("/v1/responses", {"include": ["message.output_text.logprobs"]}, "include"),
        ("/v1/responses", {"tools": [{"type": "file_search"}]}, "the type 'file_search' is not supported"),
        (
            "/v1/responses",
            {"input": [{"type": "mcp_call", "id": "1"}]},
            "the type 'mcp_call' is not supported",
        ),
        ("/v1/chat/completions", {"enable_thinking": False}, "use chat_template_kwargs"),
        ("/v1/chat/completions", {"thinking": {"type": "disabled"}}, "use chat_template_kwargs"),
        ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice is for requests with tools"),
        ("/v1/messages", {"mcp_servers": [{"name": "x"}]}, "'mcp_servers' is not supported"),
        ("/v1/messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ("/v1/chat/completions", {"zzz": None}, "'zzz' is not supported"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    http: httpx.Client, path: str, fields: dict[str, Any], words: str
) -> None:
    response = http.post(path, json=BODIES[path] | fields)
    assert response.status_code == 400, response.text
    assert words in error(response)["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **CACHED}]}]},
        {"tools": [{"type": "function", "function": {"name": "now"}, **CACHED}]},
    ],
)
def test_no_tools_and_marks_of_a_cache_are_taken(http: httpx.Client, fields: dict[str, Any]) -> None:
    path = "/v1/chat/completions"
    response = http.post(path, json=BODIES[path] | fields)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("most", [-1, 0])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_no_limit_and_no_tokens(http: httpx.Client, path: str, most: int) -> None:
    answer = http.post(path, json=BODIES[path] | {"max_tokens": most}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (answer["usage"]["completion_tokens"] > 2) == (most == -1)
    assert answer["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "assistant", "content": "x", "parsed": None, "refusal": None}],
        [
            {
                "role": "assistant",
                "content": "x",
                "parsed": {"a": 1},
                "annotations": [{"type": "url_citation"}],
            }
        ],
        [{"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}]}, RESULT],
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{**CALL, "function": {**CALL["function"], "parsed_arguments": {}}}],  # type: ignore[dict-item]
            },
            RESULT,
        ],
        [{"role": "assistant", "content": "x", "reasoning_content": "r", "thinking_blocks": []}],
        [{"role": "assistant", "content": "x", "provider_specific_fields": {"citations": None}}],
        [{"role": "assistant", "content": None, "function_call": None, "audio": None, "tool_calls": None}],
    ],
)
def test_a_message_of_an_sdk_comes_back(http: httpx.Client, turns: list[dict[str, Any]]) -> None:
    response = http.post("/v1/chat/completions", json={"messages": [USER, *turns, USER], "max_tokens": 2})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        ("/v1/messages?beta=true", {"thinking": {"type": "adaptive"}}, "thinking"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (
            "/v1/messages",
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "thinking.budget_tokens",
        ),
        ("/v1/chat/completions", {"thinking_token_budget": 8}, "thinking_token_budget"),
        ("/v1/messages", {"context_management": {"edits": []}}, "context_management"),
        ("/v1/messages", {"output_config": {"effort": "medium"}}, "output_config.effort"),
        (
            "/v1/messages",
            {"tools": [{"type": "web_search_20250305", "name": "w"}]},
            "tools.web_search_20250305",
        ),
        ("/v1/responses", {"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning"),
        ("/v1/responses", {"include": ["reasoning.encrypted_content"]}, "include"),
        ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools.web_search"),
        ("/v1/responses", {"client_metadata": {"session_id": "1"}}, "client_metadata"),
        ("/v1/responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
        ("/v1/chat/completions", {"reasoning_effort": "high"}, "reasoning_effort"),
    ],
)
def test_what_agents_send_is_taken(
    http: httpx.Client, path: str, fields: dict[str, Any], ignored: str
) -> None:
    response = http.post(path, json=BODIES[path.partition("?")[0]] | fields)
    assert response.status_code == 200, response.text
    assert ignored in response.headers[IGNORED].split(", ")


def test_thinking_and_results_in_parts_come_back(http: httpx.Client) -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": ""}
    turns = [USER, {"role": "assistant", "content": [thinking, {"type": "text", "text": "yo"}]}, USER]
    assert http.post("/v1/messages", json={"messages": turns, "max_tokens": 2}).status_code == 200
    items = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {"type": "function_call", "call_id": "a", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "12"}]},
    ]
    assert http.post("/v1/responses", json={"input": items, "max_output_tokens": 2}).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_the_schema_says_what_is_taken(path: str) -> None:
    schema = Draft202012Validator(KINDS[path].model_json_schema())
    nulls = dict.fromkeys([*optional(path), *HARMLESS, *SPELLED_OUT])
    assert not list(schema.iter_errors(nulls | BODIES[path]))
    assert list(schema.iter_errors(BODIES[path] | {"zzz": None}))
