"""POST /generate in SGLang's form: answers, lists, log-probabilities, streams, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import SLOW_SEED
from http_support import MODEL, Running, command, error, events, serving, wait_until

from torchwright.serve.limits import Limits

GREEDY = {"temperature": 0, "max_new_tokens": 4}
SLOW = GREEDY | {"max_new_tokens": 900, "sampling_seed": SLOW_SEED}
TEXT = "once upon a time there was"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(limits=Limits(scored_values=4096, scored_answers=8192)) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def ids(http: httpx.Client, text: str = TEXT) -> list[int]:
    return http.post("/tokenize", json={"prompt": text}).json()["tokens"]


def generate(http: httpx.Client, **fields: Any) -> Any:
    response = http.post("/generate", json={"text": TEXT, "sampling_params": GREEDY} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_text_is_continued(http: httpx.Client) -> None:
    """The fake engine answers with the prompt's own tokens from the second on."""
    prompt, answer = ids(http), generate(http)
    assert answer.keys() == {"text", "output_ids", "meta_info"}
    assert answer["output_ids"] == prompt[1:5]
    assert answer["text"] == http.post("/detokenize", json={"tokens": prompt[1:5]}).json()["prompt"]
    facts = answer["meta_info"]
    assert facts.pop("id").startswith("gen-")
    assert facts.pop("e2e_latency") > 0
    assert facts == {
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": len(prompt),
        "completion_tokens": 4,
        "cached_tokens": 3,
        "total_retractions": 0,
        "weight_version": "fake",
        "weight_versions": [{"version": "fake", "start": 0, "end": 4}],
    }


def test_token_ids_are_continued_as_they_are(http: httpx.Client) -> None:
    answer = generate(http, text=None, input_ids=[5, 6, 7, 8])
    assert (answer["output_ids"], answer["meta_info"]["prompt_tokens"]) == ([6, 7, 8, 6], 4)


def test_a_list_is_answered_by_a_list_and_one_prompt_by_an_object(http: httpx.Client) -> None:
    many = generate(http, text=[TEXT, "a b c"], rid=["one", "two"])
    assert [answer["meta_info"]["id"] for answer in many] == ["one", "two"]
    assert [answer["output_ids"] for answer in many] == [ids(http)[1:5], (ids(http, "a b c")[1:] * 4)[:4]]
    assert isinstance(generate(http, text=[TEXT]), list)
    rows = generate(http, text=None, input_ids=[[5, 6], [7, 8, 9]], rid="r")
    assert [row["meta_info"]["id"] for row in rows] == ["r_0", "r_1"]


def test_each_prompt_has_its_own_options(http: httpx.Client) -> None:
    rows = generate(
        http,
        text=[TEXT, TEXT],
        sampling_params=[GREEDY, GREEDY | {"max_new_tokens": 2, "stop_token_ids": [ids(http)[1]]}],
        return_logprob=[False, True],
        top_logprobs_num=[0, 1],
    )
    assert [row["meta_info"]["finish_reason"]["type"] for row in rows] == ["length", "stop"]
    assert rows[1]["meta_info"]["finish_reason"]["matched"] == ids(http)[1]
    assert "output_token_logprobs" not in rows[0]["meta_info"]
    assert len(rows[1]["meta_info"]["output_top_logprobs"][0]) == 1


def test_n_answers_are_a_list(http: httpx.Client) -> None:
    rows = generate(http, sampling_params=GREEDY | {"n": 3}, rid="many")
    assert [row["meta_info"]["id"] for row in rows] == ["many_0", "many_1", "many_2"]


def test_nothing_new_is_generated_to_warm_a_prefix(http: httpx.Client) -> None:
    answer = generate(http, sampling_params={"max_new_tokens": 0})
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_log_probabilities_have_tokens_and_texts(http: httpx.Client) -> None:
    prompt = ids(http)
    facts = generate(
        http,
        return_logprob=True,
        logprob_start_len=2,
        top_logprobs_num=2,
        token_ids_logprob=[9, 11],
        return_text_in_logprobs=True,
    )["meta_info"]
    scored = facts["input_token_logprobs"]
    assert [id for _, id, _ in scored] == prompt[2:]
    assert [logprob for logprob, _, _ in scored] == [-1.0] * (len(prompt) - 2)
    assert [text for _, _, text in facts["output_token_logprobs"]] == [
        http.post("/detokenize", json={"tokens": [id]}).json()["prompt"] for id in prompt[1:5]
    ]
    own, other = facts["output_top_logprobs"][0]
    assert (own, other[:2]) == (facts["output_token_logprobs"][0], [-2.0, 7])
    assert [pair[:2] for pair in facts["input_token_ids_logprobs"][0]] == [[-3.0, 9], [-3.0, 11]]
    assert [pair[:2] for pair in facts["output_token_ids_logprobs"][0]] == [[-3.0, 9], [-3.0, 11]]


def test_only_answers_are_scored_by_default_and_prompts_where_nothing_is_generated(
    http: httpx.Client,
) -> None:
    assert generate(http, return_logprob=True)["meta_info"]["input_token_logprobs"] == []
    facts = generate(http, return_logprob=True, sampling_params={"max_new_tokens": 0})["meta_info"]
    assert len(facts["input_token_logprobs"]) == len(ids(http))
    assert facts["output_token_logprobs"] == []
    assert facts["input_token_logprobs"][0] == [None, ids(http)[0], None]


@pytest.mark.parametrize("many", [False, True])
def test_a_stream_has_all_of_the_text_so_far(http: httpx.Client, many: bool) -> None:
    body = {"text": [TEXT] * 2 if many else TEXT, "sampling_params": GREEDY, "stream": True}
    response = http.post("/generate", json=body)
    assert response.text.rstrip().endswith("data: [DONE]")
    told = [event for event in events(response.text) if event.get("index", 0) == 0]
    assert ("index" in told[0]) == many
    assert [event["output_ids"] for event in told] == [ids(http)[1 : 2 + i] for i in range(4)]
    texts = [event["text"] for event in told]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert [event["meta_info"]["finish_reason"] for event in told][:-1] == [None] * 3
    whole = generate(http)
    assert (told[-1]["text"], told[-1]["output_ids"]) == (whole["text"], whole["output_ids"])


def test_a_long_stream_does_not_cost_the_square_of_its_length(http: httpx.Client) -> None:
    body = {"text": TEXT, "sampling_params": GREEDY | {"max_new_tokens": 900}, "stream": True}
    plain = events(http.post("/generate", json=body).text)
    scored = events(http.post("/generate", json=body | {"return_logprob": True}).text)
    assert len(plain[-1]["output_ids"]) == len(scored[-1]["output_ids"]) == 900
    assert 256 < len(plain) < 700
    assert len(scored) < 120


def test_stop_texts_end_an_answer_and_may_stay(http: httpx.Client) -> None:
    whole = generate(http)["text"]
    stop = whole.split()[1]
    cut = generate(http, sampling_params=GREEDY | {"stop": [stop]})
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    kept = generate(http, sampling_params=GREEDY | {"stop": stop, "no_stop_trim": True})
    assert kept["text"] == cut["text"] + stop


def test_the_models_end_is_named_and_shown_on_demand(http: httpx.Client) -> None:
    prompt = [5, 6, 1, 7]  # 1 ends texts
    answer = generate(http, text=None, input_ids=prompt)
    assert answer["output_ids"] == [6, 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}
    shown = GREEDY | {"no_stop_trim": True, "skip_special_tokens": False}
    end = http.post("/detokenize", json={"tokens": [1]}).json()["prompt"]
    assert generate(http, text=None, input_ids=prompt, sampling_params=shown)["text"] == answer["text"] + end


def test_an_aborted_request_answers_with_what_it_has(http: httpx.Client, server: Running) -> None:
    body = {"text": TEXT, "sampling_params": SLOW, "rid": "mine", "stream": True}
    with http.stream("POST", "/generate", json=body | {"text": [TEXT]}) as response:
        lines = response.iter_lines()
        next(lines)
        again = http.post("/generate", json={"text": TEXT, "rid": "mine", "sampling_params": GREEDY})
        assert (again.status_code, error(again)["code"]) == (400, "id_in_use")
        told = http.post("/abort_request", json={"rid": "mine"}).json()
        text = "\n".join(lines)
    last = events(text)[-1]
    assert told == {"status": "ok", "num_aborted_requests": 1}
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(last["output_ids"]) < 900
    wait_until(server.cancelled)
    assert http.post("/abort_request", json={"rid": "mine"}).json()["num_aborted_requests"] == 0


def test_what_cannot_change_the_answer_is_named(http: httpx.Client) -> None:
    params = GREEDY | {"spaces_between_special_tokens": False, "stop_regex": [], "regex": None}
    for text in (TEXT, [TEXT]):
        body = {"text": text, "sampling_params": params if text == TEXT else [params], "routing_key": "k"}
        response = http.post("/generate", json=body)
        ignored = "routing_key, sampling_params.spaces_between_special_tokens"
        assert sorted(response.headers["x-torchwright-ignored"].split(", ")) == sorted(ignored.split(", "))


def test_a_long_body_is_read_in_another_process(http: httpx.Client) -> None:
    text = "a b c d " * 100
    body = {
        "text": [text],
        "sampling_params": [GREEDY],
        "rid": ["long"],
        "custom_labels": {"a": "b" * 20_000},
    }
    response = http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    (row,) = response.json()
    assert row["output_ids"] == ids(http, text)[1:5]
    assert row["meta_info"]["id"] == "long"
    assert response.headers["x-torchwright-ignored"] == "custom_labels"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text": None}, "give text or input_ids"),
        ({"input_ids": [3]}, "give text or input_ids"),
        ({"text": None, "input_ids": [99_999]}, "token id 99999 is out of range"),
        ({"text": None, "input_ids": []}, "input_ids"),
        ({"text": []}, "text"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_tokens": 3}}, "'sampling_params.max_tokens' is not supported"),
        ({"sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "give one of regex"),
        ({"sampling_params": {"json_schema": "{"}}, "not the text of a JSON schema"),
        ({"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}}, "min_new_tokens is more"),
        ({"sampling_params": {"n": 65}}, "sampling_params.n"),
        ({"sampling_params": {"stop_regex": "a+"}}, "stop_regex"),
        ({"sampling_params": {"max_new_tokens": 5000}}, "the model's context is 1024 tokens"),
        ({"sampling_params": [GREEDY, GREEDY]}, "2 entries for 1 prompts"),
        ({"text": ["a"] * 2, "return_logprob": [True]}, "'return_logprob' has 1 entries for 2 prompts"),
        ({"text": ["a"] * 2, "sampling_params": [{"n": 1}, {"n": 2}]}, "the same n"),
        ({"text": ["a"] * 200, "sampling_params": {"n": 3}}, "more than 512 answers"),
        ({"return_logprob": True, "top_logprobs_num": 129}, "top_logprobs_num"),
        ({"return_logprob": True, "token_ids_logprob": [5000]}, "5000"),
        ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        (
            {"return_logprob": True, "top_logprobs_num": 100, "logprob_start_len": 0, "text": "a b " * 60},
            "at most 4096 are sent",
        ),
        (
            {"return_logprob": True, "top_logprobs_num": 100, "sampling_params": {"max_new_tokens": 500}},
            "at most 8192 are sent",
        ),
        ({"image_data": "x"}, "'image_data' is not supported"),
        ({"custom_logit_processor": "x"}, "no code of a request's is run"),
        ({"lora_path": "none"}, "there is no model 'none'"),
        ({"rid": "a b"}, "rid"),
        ({"zzz": 1}, "'zzz' is not supported"),
    ],
)
def test_what_is_wrong_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], words: str) -> None:
    response = http.post("/generate", json={"text": TEXT, "sampling_params": GREEDY} | fields)
    assert response.status_code in (400, 404), response.text
    assert words in error(response)["message"]


def test_the_prefix_cache_is_emptied_while_nothing_runs(http: httpx.Client, server: Running) -> None:
    wait_until(server.cancelled)
    for response in (
        http.post("/flush_cache"),
        http.get("/flush_cache"),
        http.post("/flush_cache", json={"empty_cache": True}),
    ):
        assert response.status_code == 200, response.text
    body = {"text": TEXT, "sampling_params": SLOW, "stream": True}
    with http.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert http.post("/flush_cache").status_code == 400


def test_a_model_that_writes_no_text_says_so() -> None:
    with serving(kind="encoder") as running:
        for path in ("/generate", "/flush_cache"):
            response = httpx.post(f"{running.url}{path}", json={"text": "a"} if path == "/generate" else {})
            assert error(response)["code"] == "wrong_model_kind"


@pytest.mark.slow
def test_the_real_engine_scores_prompts_behind_a_cached_prefix() -> None:
    """With the bundled model: log-probabilities from the middle on are those of a whole scoring, and of completions."""
    with command() as real, httpx.Client(base_url=real.url, timeout=60) as http:
        text = "The quick brown fox jumps over the lazy dog. " * 4
        prompt = ids(http, text)
        scored = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "top_logprobs_num": 3}
        whole = generate(http, text=text, **scored)["meta_info"]
        generate(http, text=text, sampling_params={"max_new_tokens": 0})
        tail = generate(http, text=text, logprob_start_len=40, token_ids_logprob=[prompt[-1]], **scored)
        facts = tail["meta_info"]
        assert facts["cached_tokens"] == 32, "whole pages before the first scored token"
        assert facts["input_token_logprobs"] == whole["input_token_logprobs"][40:]
        assert facts["input_top_logprobs"] == whole["input_top_logprobs"][40:]
        last = facts["input_token_ids_logprobs"][-1][0]
        assert last[:2] == facts["input_token_logprobs"][-1][:2]
        completion = {"model": MODEL, "prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0}
        choice = http.post("/v1/completions", json=completion).json()["choices"][0]
        assert choice["logprobs"]["token_logprobs"] == [
            score for score, _, _ in whole["input_token_logprobs"]
        ]
        form = GREEDY | {"regex": "[0-9]{3}-[0-9]{2}", "max_new_tokens": 32}
        assert [*generate(http, sampling_params=form)["text"]][3] == "-"
        judged = http.post(
            "/v1/score",
            json={"query": text, "items": [" yes", " no"], "label_token_ids": [5, 6], "apply_softmax": True},
        ).json()
        assert [round(sum(row), 6) for row in judged["scores"]] == [1.0, 1.0]
