"""Reasoning and calls in the shape of each API, whole and streamed, from a template that makes the engine say anything.

The fake engine repeats a prompt's tokens from the second on, so that the message's words are the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_support import Running, events, serving, submits

from torchwright.serve.wire.messages import ToEngine

# `open` in the message ends the prompt within reasoning, as DeepSeek's templates do.
ECHO = (
    "{{ bos_token }}{{ messages[-1].content }}<|end|>{% if tools %}{% endif %}"
    "{% if thinking_opened %}<think>\n{% endif %}{# </think> #}"
)
THOUGHT, SAID = "First this, then\n\nthat.", "It is stop 3."
WHOLE = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "stop é"}}\n</tool_call>'
FLAT = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(template=ECHO) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def chat(http: httpx.Client, said: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": said}], **more}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def deltas(http: httpx.Client, said: str, **more: Any) -> list[dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": said}], "stream": True, **more}
    return [
        event["choices"][0]["delta"] for event in events(http.post("/v1/chat/completions", json=body).text)
    ]


@pytest.mark.slow
def test_a_chat_completion_has_its_reasoning_apart(http: httpx.Client) -> None:
    found = chat(http, WHOLE)
    message = found["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, SAID)
    assert message["reasoning"] == THOUGHT
    assert found["choices"][0]["finish_reason"] == "stop"
    used = found["usage"]
    assert 0 < used["completion_tokens_details"]["reasoning_tokens"] < used["completion_tokens"]
    assert "reasoning_content" not in chat(http, SAID)["choices"][0]["message"]
    assert "completion_tokens_details" not in chat(http, SAID)["usage"]


def test_a_stream_sends_reasoning_first(http: httpx.Client) -> None:
    found = deltas(http, WHOLE)
    assert "".join(delta.get("reasoning_content", "") for delta in found) == THOUGHT
    assert "".join(delta.get("content", "") for delta in found) == SAID
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in found)
    kinds = ["reasoning" if "reasoning" in delta else "text" for delta in found[1:] if delta]
    assert kinds == sorted(kinds)


@pytest.mark.parametrize("length", [10, 70_000])
def test_reasoning_that_the_template_opens(http: httpx.Client, length: int) -> None:
    """Long requests are read in another process."""
    opened = {"chat_template_kwargs": {"thinking_opened": True, "padding": "x" * length}}
    message = chat(http, f"{THOUGHT}</think>{SAID}", **opened)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, SAID)
    cut = chat(http, f"{THOUGHT}</think>{SAID}", max_tokens=4, **opened)["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("", "length")
    assert THOUGHT.startswith(cut["message"]["reasoning_content"])


def test_stop_texts_are_looked_for_in_the_answer_alone(http: httpx.Client) -> None:
    found = chat(http, f"<think>stop that</think>It is stop 3.{CALL}", stop=["stop"], tools=[TOOL])
    choice = found["choices"][0]
    assert choice["message"]["reasoning_content"] == "stop that"
    assert choice["message"]["content"] == "It is "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "stop")
    called = chat(http, f"<think>stop</think>{CALL}", stop=["stop", "\n"], tools=[TOOL])["choices"][0]
    assert called["finish_reason"] == "tool_calls"
    assert json.loads(called["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": "stop é"}
    assert called["message"]["content"] is None


def test_one_call_ends_an_answer(http: httpx.Client) -> None:
    twice = f"<think>hm</think>{CALL}\n{CALL}"
    choice = chat(http, twice, tools=[TOOL], parallel_tool_calls=False)["choices"][0]
    assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "tool_calls")
    assert len(chat(http, twice, tools=[TOOL])["choices"][0]["message"]["tool_calls"]) == 2


@pytest.mark.parametrize("length", [10, 70_000])
@pytest.mark.parametrize(
    ("path", "field", "name"),
    [
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 7}}, "thinking.budget_tokens"),
        ("/v1/chat/completions", {"thinking_token_budget": 7}, "thinking_token_budget"),
    ],
)
def test_a_bound_of_reasoning_reaches_the_engine(
    http: httpx.Client,
    sent: list[ToEngine],
    length: int,
    path: str,
    field: dict[str, Any],
    name: str,
) -> None:
    """Long requests are read in another process."""
    body = {"messages": [{"role": "user", "content": WHOLE}], "max_tokens": 20}
    body |= {"chat_template_kwargs": {"padding": "x" * length}}
    response = http.post(path, json=body | field)
    assert response.status_code == 200, response.text
    assert name not in response.headers.get("x-torchwright-ignored", "")
    assert http.post(path, json=body).status_code == 200
    bound, free = submits(sent)
    assert bound.thinking is not None
    assert (bound.thinking.begin, bound.thinking.end, bound.thinking.tokens) == ("<think>", "</think>", 7)
    assert (bound.grammar, free.thinking) == (None, None)


def test_messages_have_thinking_blocks(http: httpx.Client) -> None:
    tool = {"name": "add", "input_schema": {"type": "object"}}
    body = {
        "messages": [{"role": "user", "content": f"<think>hm</think>Well.{CALL}"}],
        "max_tokens": 200,
        "tools": [tool],
    }
    whole = http.post("/v1/messages", json=body).json()
    thinking, text, call = whole["content"]
    assert thinking == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert text == {"type": "text", "text": "Well."}
    assert (call["type"], call["input"], whole["stop_reason"]) == ("tool_use", {"a": "stop é"}, "tool_use")
    streamed = events(http.post("/v1/messages", json=body | {"stream": True}).text)
    begun = [event["content_block"]["type"] for event in streamed if event["type"] == "content_block_start"]
    assert begun == ["thinking", "text", "tool_use"]
    kinds = [event["delta"]["type"] for event in streamed if event["type"] == "content_block_delta"]
    assert list(dict.fromkeys(kinds)) == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
    ]


def test_text_behind_a_call_leaves_the_reason_of_the_end(http: httpx.Client) -> None:
    """A client that reads another reason does not run the tool."""
    body = {
        "messages": [{"role": "user", "content": f"{CALL}\nIt is called."}],
        "max_tokens": 200,
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    }
    whole = http.post("/v1/messages", json=body).json()
    assert [block["type"] for block in whole["content"]] == ["tool_use", "text"]
    streamed = events(http.post("/v1/messages", json=body | {"stream": True}).text)
    (end,) = [event["delta"] for event in streamed if event["type"] == "message_delta"]
    assert (whole["stop_reason"], end["stop_reason"]) == ("tool_use", "tool_use")
    found = chat(http, f"{CALL}\nIt is called.", tools=[TOOL])["choices"][0]
    assert found["finish_reason"] == "tool_calls"


def test_responses_have_reasoning_items(http: httpx.Client) -> None:
    body = {"input": WHOLE}
    whole = http.post("/v1/responses", json=body).json()
    reasoning, message = whole["output"]
    assert (reasoning["type"], reasoning["summary"], reasoning["status"]) == ("reasoning", [], "completed")
    assert reasoning["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert message["content"][0]["text"] == SAID
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    streamed = events(http.post("/v1/responses", json=body | {"stream": True}).text)
    kinds = list(dict.fromkeys(event["type"] for event in streamed))
    assert kinds.index("response.reasoning_text.delta") < kinds.index("response.reasoning_text.done")
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    grown = "".join(e["delta"] for e in streamed if e["type"] == "response.reasoning_text.delta")
    assert grown == THOUGHT


def test_completions_are_left_as_they_are(http: httpx.Client) -> None:
    found = http.post(
        "/v1/completions", json={"prompt": f"<|begin|>{WHOLE}<|end|>", "max_tokens": 200}
    ).json()
    assert found["choices"][0]["text"].startswith("<think>")


@pytest.mark.slow
def test_the_format_of_calls_can_be_chosen() -> None:
    with (
        serving(template=ECHO, tools="mistral") as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        found = chat(http, '[TOOL_CALLS]add[ARGS]{"a": 1}', tools=[TOOL])["choices"][0]
        assert found["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
        assert chat(http, CALL, tools=[TOOL])["choices"][0]["message"]["content"] == CALL


def test_a_namespace_of_functions_is_called_and_comes_back(http: httpx.Client) -> None:
    """As Codex sends them: the model knows the functions by joined names, and the client gets both parts."""
    tools = [{"type": "namespace", "name": "agents", "description": "Others.", "tools": [FLAT]}, FLAT]
    call = '<tool_call>\n{"name": "NAME", "arguments": {"a": 1}}\n</tool_call>'
    both = call.replace("NAME", "agents__add") + "\n" + call.replace("NAME", "add")
    found = http.post("/v1/responses", json={"input": both, "tools": tools}).json()
    calls = [item for item in found["output"] if item["type"] == "function_call"]
    assert [(item.get("namespace"), item["name"]) for item in calls] == [("agents", "add"), (None, "add")]
    streamed = events(http.post("/v1/responses", json={"input": both, "tools": tools, "stream": True}).text)
    added = [event["item"] for event in streamed if event["type"] == "response.output_item.added"]
    assert [item.get("namespace") for item in added if item["type"] == "function_call"] == ["agents", None]
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "2"} for item in calls]
    turns = [{"role": "user", "content": both}, *calls, *results, {"role": "user", "content": SAID}]
    again = http.post("/v1/responses", json={"input": turns, "tools": tools})
    assert again.status_code == 200, again.text
    twice = http.post("/v1/responses", json={"input": SAID, "tools": [FLAT, FLAT]})
    assert twice.status_code == 400
    assert "same name" in twice.json()["error"]["message"]
