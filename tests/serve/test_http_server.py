"""The server against a fake engine: what clients get, how requests end, and what happens when things go wrong."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import CHUNK_SEED, CONTEXT, Trouble
from http_support import MODEL, Running, error, events, serving, wait_until

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


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


@pytest.mark.parametrize(
    "fields", [{"stop": ["ick b"]}, {"stop_token_ids": [2]}, {"stop": ["ick b"], "min_tokens": 6}]
)
def test_draft_tokens_behind_the_end_are_no_part_of_the_answer(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    """Several tokens of a step give the text, the scores and the counts that one at a time give (sglang#39826)."""
    stops = {"stop_token_ids": ids(http, PROMPT)[3:4]} if "stop_token_ids" in fields else {}
    body = {"prompt": PROMPT, "max_tokens": 30, "logprobs": 1, "return_token_ids": True} | fields | stops
    one, several = (
        http.post("/v1/completions", json=body | {"seed": seed}).json() for seed in (1, CHUNK_SEED)
    )
    assert several["choices"] == one["choices"]
    assert several["usage"] == one["usage"]
    assert one["choices"][0]["finish_reason"] == "stop"
    assert len(one["choices"][0]["token_ids"]) == one["usage"]["completion_tokens"] < 30


IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}


def test_token_ids_come_with_the_one_that_ends_an_answer(http: httpx.Client) -> None:
    """As vLLM gives them, so that trainers need not tokenize texts again; scores belong to the same tokens."""
    prompt = ids(http, PROMPT)
    wanted = prompt[1:4]
    body = {"prompt": [prompt, prompt], "n": 2, "max_tokens": 6, "stop_token_ids": wanted[-1:], "logprobs": 0}
    choices = http.post("/v1/completions", json=body | IDS).json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [wanted] * 4
    assert [choice["prompt_token_ids"] for choice in choices] == [prompt, None, prompt, None]
    for choice in choices:
        assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in wanted]
        assert choice["logprobs"]["token_logprobs"] == [-0.5] * 3
    streamed: dict[int, list[int]] = {index: [] for index in range(4)}
    prompts: dict[int, list[Any]] = {index: [] for index in range(4)}
    for chunk in events(http.post("/v1/completions", json=body | IDS | {"stream": True}).text):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["token_ids"]
            prompts[choice["index"]] += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
    assert streamed == dict.fromkeys(range(4), wanted)
    assert prompts == {0: [prompt], 1: [None], 2: [prompt], 3: [None]}
    without = http.post("/v1/completions", json=body).json()["choices"][0]
    assert not {"token_ids", "prompt_token_ids"} & without.keys()
    assert len(without["logprobs"]["tokens"]) == 2


def test_token_ids_of_a_chat(http: httpx.Client) -> None:
    messages = {"messages": [{"role": "user", "content": PROMPT}]}
    body = messages | {"max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    whole = http.post("/v1/chat/completions", json=body | IDS).json()
    prompt = http.post("/tokenize", json=messages).json()["tokens"]
    [choice] = whole["choices"]
    assert (whole["prompt_token_ids"], choice["token_ids"]) == (prompt, prompt[1:6])
    names = [f"token_id:{id}" for id in prompt[1:6]]
    assert [score["token"] for score in choice["logprobs"]["content"]] == names
    assert choice["logprobs"]["content"][0]["top_logprobs"][1]["token"] == "token_id:7"
    chunks = events(http.post("/v1/chat/completions", json=body | IDS | {"stream": True}).text)
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [prompt]
    streamed = [id for chunk in chunks for choice in chunk["choices"] for id in choice.get("token_ids", [])]
    assert streamed == prompt[1:6]


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
        (b'{"prompt": "\xff"}', 400, "not valid JSON"),
        (b'{"prompt": "\\ud800"}', 400, "JSON"),
        (b"[" * 100_000, 400, "more than 128 deep"),
        (b"[]", 400, "object"),
        (b"{}", 400, "'prompt' is missing"),
        (b'{"prompt": 1}', 400, "prompt"),
        (b'{"prompt": []}', 400, "prompt"),
        (b'{"prompt": [1, "a"]}', 400, "prompt"),
        (b'{"prompt": [5000]}', 400, "token id 5000 is out of range"),
        (b'{"prompt": "x", "max_tokens": "5"}', 400, "max_tokens"),
        (b'{"prompt": "x", "max_tokens": -2}', 400, "max_tokens"),
        (b'{"prompt": "x", "max_tokens": true}', 400, "max_tokens"),
        (b'{"prompt": "x", "temperature": NaN}', 400, "not valid JSON"),
        (b'{"prompt": "x", "temperature": 1e999}', 400, "out of range"),
        (b'{"prompt": "x", "n": 1000}', 400, "'n'"),
        (b'{"prompt": "x", "stop": [""]}', 400, "stop"),
        (b'{"prompt": "x", "logit_bias": {"9999": 1}}', 400, "9999"),
        (b'{"prompt": "x", "logit_bias": {"a": 1}}', 400, "logit_bias"),
        (b'{"prompt": "x", "best_of": 2}', 400, "'best_of' is not supported"),
        (b'{"prompt": "x", "zzz": 2}', 400, "'zzz' is not supported"),
        (b'{"prompt": "x", "guided_whitespace_pattern": "a"}', 400, "white space"),
        (b'{"prompt": "x", "guided_regex": "a", "guided_choice": ["b"]}', 400, "different forms"),
        (b'{"prompt": "x", "guided_json": "{"}', 400, "not the text of a JSON schema"),
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
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "the served model takes text alone",
        ),
        ({"tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "not in tools"),
        ({"tools": TOOLS * 2}, "same name"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "differ"),
        ({"chat_template_kwargs": {"messages": []}}, "cannot set messages"),
        ({"chat_template": "{{ 7 * 7 }}"}, "'chat_template' is not supported"),
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
