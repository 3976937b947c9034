"""SGLang's own language drives the server; and the bodies that it sends, where it is not installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_support import MODEL, Command, command

PROGRAMS = Path(__file__).parent / "sglang_programs.py"
LONG = "The quick brown fox jumps over the lazy dog near the river bank. " * 12
KEY = {"Authorization": "Bearer secret"}
SPECIAL = {"skip_special_tokens": True, "spaces_between_special_tokens": True}


@pytest.fixture(scope="module")
def url(bundled_server: Callable[[], Command]) -> str:
    return bundled_server().url


def test_six_programs_of_the_language_run() -> None:
    python = os.environ.get("SGLANG_PYTHON")
    if python is None:
        pytest.skip(
            "no sglang here: `pip install --no-deps sglang`, what its import wants, and SGLANG_PYTHON=PATH"
        )
    with command() as server:
        done = subprocess.run(
            [python, str(PROGRAMS), server.url], capture_output=True, text=True, timeout=240, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["server"] == MODEL
    assert found["tree_of_thought"]["best"] in (" 0", " 1", " 2")
    assert all(f"\nPlan {i}:" in found["tree_of_thought"]["text"] for i in range(3))
    assert found["multi_turn_judge"]["grade"] in (" A", " B", " C")
    assert not any("\n" in turn for turn in found["multi_turn_judge"]["turns"])
    assert found["parallel_expansion"]["summary"]
    record = json.loads(found["json_decoding"]["record"])
    assert record.keys() == {"name", "age"}
    assert re.match(r"[-+]?[0-9]+", found["json_decoding"]["count"].strip())
    assert isinstance(json.loads(found["json_decoding"]["flag"])["ok"], bool)
    assert set(found["react"]["tools"]) <= {" add", " search", " finish"}
    assert found["retrieval"] == found["alone"], "a batch answers as each question alone"
    assert found["streamed"] == found["alone"][0]
    assert found["scores"] == 8
    assert set(found["methods"]) <= {" fox", " dog", " river bank"}


def post(url: str, body: dict[str, Any]) -> Any:
    response = httpx.post(f"{url}/generate", json=body, headers=KEY, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def gen(url: str, text: str, tokens: int = 8, **params: Any) -> str:
    """The body of the language's `gen`: every option is spelled out."""
    params = {
        **SPECIAL, "max_new_tokens": tokens, "min_new_tokens": 0, "n": 1, "stop": [], "stop_token_ids": [],
        "stop_regex": [], "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "ignore_eos": False, "regex": None, "json_schema": None,
    } | params  # fmt: skip
    return post(url, {"text": text, "sampling_params": params})["text"]


def select(url: str, text: str, choices: list[str]) -> str:
    """The bodies of the language's `select`, and its choice by the mean log-probability of the tokens."""
    warmed = post(url, {"text": text, "sampling_params": {"max_new_tokens": 0}})
    start = max(warmed["meta_info"]["prompt_tokens"] - 2, 0)
    found = post(
        url,
        {
            "text": [text + choice for choice in choices],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "return_text_in_logprobs": True,
            "logprob_start_len": start,
        },
    )
    means = []
    for one in found:
        scored = one["meta_info"]["input_token_logprobs"]
        assert all(score < 0 for score, _, _ in scored), "the language cannot do without the first one's"
        assert all(isinstance(piece, str) for _, _, piece in scored)
        assert one["meta_info"]["output_token_logprobs"] == []
        values = [score for score, _, _ in scored if score]
        means.append(sum(values) / len(values))
    return choices[means.index(max(means))]


@pytest.mark.slow
def test_a_tree_of_thought(url: str) -> None:
    text = LONG + "How?"
    plans = [gen(url, f"{text}\nPlan {i}:") for i in range(3)]
    told = text + "".join(f"\nPlan {i}:{plan}" for i, plan in enumerate(plans))
    assert select(url, told + "\nBest:", [" 0", " 1", " 2"]) in (" 0", " 1", " 2")


def test_a_judge_of_several_turns(url: str) -> None:
    text = LONG + "An essay."
    for respect in ("clarity", "style"):
        text += f"\nJudge the {respect}:"
        text += gen(url, text, 6, stop=["\n"])
    assert select(url, text + "\nGrade:", [" A", " B", " C"]) in (" A", " B", " C")


def test_an_expansion_in_parallel_shares_its_prefix(url: str) -> None:
    httpx.post(f"{url}/flush_cache", json={"empty_cache": True}, headers=KEY).raise_for_status()
    prompt = post(url, {"text": LONG, "sampling_params": {"max_new_tokens": 0}})["meta_info"]["prompt_tokens"]
    rows = post(
        url, {"text": [f"{LONG}\nTip {i}:" for i in range(4)], "sampling_params": {"max_new_tokens": 4}}
    )
    assert all(row["meta_info"]["cached_tokens"] >= prompt - 20 for row in rows)


@pytest.mark.slow
def test_json_is_decoded_by_regex_type_and_schema(url: str) -> None:
    regex = r'\{"name": "[a-z]{2,6}", "age": [0-9]{1,2}\}'
    assert json.loads(gen(url, "A record:", 64, regex=regex)).keys() == {"name", "age"}
    assert re.fullmatch(r"[-+]?[0-9]+", gen(url, "A count:", 8, regex=r"[-+]?[0-9]+[ \n]*", stop=[" ", "\n"]))
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    for given in (schema, json.dumps(schema)):
        assert isinstance(json.loads(gen(url, "A flag:", 128, json_schema=given))["ok"], bool)


def test_a_tool_is_chosen_and_answers(url: str) -> None:
    text = LONG + "What is 1 + 1?"
    for turn in range(2):
        text += f"\nThought {turn}:"
        text += gen(url, text, 6, stop="\n") + "\nTool:"
        text += select(url, text, [" add", " search", " finish"]) + f"\nObservation: {turn}"
    assert text.count("Observation") == 2


def test_a_document_is_asked_in_a_batch_as_one_by_one(url: str) -> None:
    prompts = [f"{LONG}\nQuestion: {one}\nAnswer:" for one in ("Who?", "When?", "Why?")]
    params = {"max_new_tokens": 8, "temperature": 0}
    rows = post(url, {"text": prompts, "sampling_params": params})
    assert [row["text"] for row in rows] == [gen(url, prompt) for prompt in prompts]


def test_unconditional_scores_have_all_tokens(url: str) -> None:
    """The request of `unconditional_likelihood_normalized`: token ids, no place to begin, and no new tokens."""
    rows = [[5, 6, 7], [8, 9]]
    found = post(url, {"input_ids": rows, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True})
    assert [[pair[1] for pair in one["meta_info"]["input_token_logprobs"]] for one in found] == rows
