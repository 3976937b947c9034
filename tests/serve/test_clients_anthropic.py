"""Anthropic's /v1/messages on the bundled model: by its own client where that is installed, and by plain HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from http_support import MODEL, Command

from torchwright.serve.openai.anthropic_request import MessagesRequest
from torchwright.serve.openai.parse import parse

PROMPT = "Sort a list of numbers."
ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 0, "maximum": 9},
            "sign": {"enum": ["+", "-"]},
        },
        "required": ["a", "sign"],
    },
}
TALK: Any = [
    {"role": "user", "content": "What is 1 + 2?"},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I add."},
            {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "sign": "+"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [{"type": "text", "text": "no"}],
                "is_error": True,
            },
            {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
        ],
    },
]


@pytest.fixture(scope="module")
def server(bundled_server: Callable[[], Command]) -> Command:
    return bundled_server()


@pytest.fixture(scope="module")
def http(server: Command) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"X-Api-Key": "secret"}, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def client(server: Command) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed")
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0, timeout=60) as client:
        yield client


def asked(**fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": 12,
        "temperature": 0,
        "messages": [{"role": "user", "content": PROMPT}],
    } | fields


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of server-sent events, each of which has its type as its name."""
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_conversation_becomes_what_a_chat_completion_has() -> None:
    body = json.dumps(asked(messages=TALK, system=[{"type": "text", "text": "Be short."}], tools=[ADD]))
    messages = parse(MessagesRequest, body.encode()).conversation()
    plain = [message.model_dump(exclude_none=True) for message in messages]
    call = {
        "id": "toolu_1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1, "sign": "+"}'},
    }
    assert plain == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: no"},
        {"role": "user", "content": "And now?"},
    ]


def test_the_answer_is_that_of_a_chat_completion(http: httpx.Client) -> None:
    found = http.post("/v1/messages", json=asked(system="Be short.")).json()
    chat = http.post(
        "/v1/chat/completions",
        headers={"Authorization": "Bearer secret"},
        json={
            "temperature": 0,
            "max_tokens": 12,
            "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": PROMPT}],
        },
    ).json()
    assert found["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", MODEL)
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    used = found["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert used["output_tokens"] == 12
    counted = http.post(
        "/v1/messages/count_tokens", json={"system": "Be short.", "messages": asked()["messages"]}
    ).json()
    assert counted == {"input_tokens": chat["usage"]["prompt_tokens"]}


def test_a_stream_has_anthropics_events(http: httpx.Client) -> None:
    whole = http.post("/v1/messages", json=asked()).json()
    found = events(http.post("/v1/messages", json=asked(stream=True)))
    start, opened, *deltas, closed, last, stop = found
    assert [event["type"] for event in (start, opened, closed, last, stop)] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert start["message"]["content"] == []
    assert start["message"]["usage"]["input_tokens"] > 0
    assert "".join(delta["delta"]["text"] for delta in deltas) == whole["content"][0]["text"]
    assert last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == 12


def test_a_stop_sequence_is_named(http: httpx.Client) -> None:
    text = http.post("/v1/messages", json=asked(max_tokens=24)).json()["content"][0]["text"]
    stop = text.split()[3]
    found = http.post("/v1/messages", json=asked(max_tokens=24, stop_sequences=["never", stop])).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    assert found["content"][0]["text"] == text.partition(stop)[0]


@pytest.mark.slow
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_tools_are_called(http: httpx.Client, choice: dict[str, Any]) -> None:
    body = asked(tools=[ADD], tool_choice=choice | {"disable_parallel_tool_use": True}, max_tokens=64, seed=1)
    whole = http.post("/v1/messages", json=body).json()
    (block,) = whole["content"]
    assert (block["type"], block["name"], whole["stop_reason"]) == ("tool_use", "add", "tool_use")
    assert block["input"]["sign"] in ("+", "-")
    _, opened, *deltas, _, last, _ = events(http.post("/v1/messages", json=body | {"stream": True}))
    assert opened["content_block"] == {
        "type": "tool_use",
        "id": opened["content_block"]["id"],
        "name": "add",
        "input": {},
    }
    assert json.loads("".join(delta["delta"]["partial_json"] for delta in deltas)) == block["input"]
    assert last["delta"]["stop_reason"] == "tool_use"


@pytest.mark.slow
def test_arguments_that_are_cut_off_are_said_to_be(http: httpx.Client) -> None:
    body = asked(tools=[ADD], tool_choice={"type": "any"}, seed=1)
    answers = (http.post("/v1/messages", json=body | {"max_tokens": most}).json() for most in range(8, 64))
    found = next(
        answer for answer in answers if answer["content"] and answer["content"][0]["type"] == "tool_use"
    )
    assert found["stop_reason"] == "max_tokens"
    assert list(found["content"][0]["input"]) == ["INVALID_JSON"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"thinking": {"type": "sometimes"}}, "thinking"),
        ({"messages": [{"role": "assistant", "content": "So"}]}, "the model begins its answers itself"),
        ({"tool_choice": {"type": "any"}}, "requests with tools"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "a name belongs to"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "not in tools"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"mcp_servers": [{"type": "url", "url": "x", "name": "x"}]}, "mcp_servers"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "content block 'document' is not supported: this server takes text and pictures",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}
                ]
            },
            "only an assistant's message has tool_use",
        ),
    ],
)
def test_what_is_not_taken_is_refused_in_anthropics_shape(
    http: httpx.Client, fields: dict[str, Any], words: str
) -> None:
    response = http.post("/v1/messages", json=asked(**fields))
    found = response.json()
    assert (response.status_code, found["type"]) == (400, "error")
    assert found["error"]["type"] == "invalid_request_error"
    assert words in found["error"]["message"]


def wanted(**fields: Any) -> dict[str, Any]:
    """The same for the client, which has no temperature any more."""
    body = asked(**fields)
    return body | {"extra_body": {"temperature": body.pop("temperature")}}


def test_the_client_reads_answers_and_errors(client: Any) -> None:
    import anthropic

    whole = client.messages.create(**wanted())
    assert whole.content[0].text
    assert whole.stop_reason == "max_tokens"
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'other'"):
        client.messages.create(**wanted(model="other"))
    with pytest.raises(anthropic.AuthenticationError, match="the API key is wrong"):
        client.with_options(api_key="wrong").messages.create(**wanted())
    assert client.messages.count_tokens(model=MODEL, messages=TALK, tools=[ADD]).input_tokens > 50
    (model,) = client.models.list().data
    assert model.id == MODEL


def test_the_client_gathers_streams(client: Any) -> None:
    whole = client.messages.create(**wanted())
    with client.messages.stream(**wanted()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens == 12
    assert final.stop_reason == "max_tokens"


def test_the_client_calls_tools_in_turns(client: Any) -> None:
    """A call is streamed, answered with a result, and the conversation goes on."""
    question: Any = {"role": "user", "content": "What is 1 + 2?"}
    body = wanted(tools=[ADD], max_tokens=64, messages=[question])
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**body, tool_choice=choice) as stream:
        message = stream.get_final_message()
    (block,) = message.content
    assert block.input.keys() == {"a", "sign"}
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
    turns = [
        question,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    after = client.messages.create(
        **body | {"messages": turns, "max_tokens": 8}, tool_choice={"type": "none"}
    )
    assert after.content[0].type == "text"


def test_the_clients_structured_output_is_enforced(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    found = client.messages.create(**wanted(max_tokens=200), output_config=config)
    assert json.loads(found.content[0].text).keys() == {"ok"}
