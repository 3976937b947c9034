"""Models that compute one answer at a time are served: the tokens of `generate`, in any company."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_support import Results, drain, request, take
from http_support import command

from folders import causal, save
from language_artifacts import PROMPT, fixed_artifact
from torchwright.optimization.artifact.folder import MODEL
from torchwright.optimization.artifact.load import load
from torchwright.optimization.continuation import ask
from torchwright.optimization.open_model import open_model
from torchwright.serve.engine.write import WritingEngine
from torchwright.serve.folder import find
from torchwright.serve.options import EngineOptions
from torchwright.serve.preflight import preflight
from torchwright.serve.wire.messages import Cancel, RequestRefused, Submit

IDS = [1, 70, 71, 72, 73]
"""GPT-2 is not of the native decoder's families."""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(causal("GPT2", num_key_value_heads=4), tmp_path_factory.mktemp("model"))
    return fixed_artifact(folder, tmp_path_factory.mktemp("out") / "artifact")


@pytest.fixture(scope="module")
def generator(artifact: Path) -> Any:
    return load(str(artifact)).model


def engine(artifact: Path, generator: Any, **options: Any) -> Any:
    given: dict[str, Any] = {"kv_memory": 1 << 22, **options}
    return WritingEngine(generator, artifact, tokenizer=artifact / MODEL, options=EngineOptions(**given))


def run(made: Any, *submits: Submit) -> Results:
    assert [made.submit(submit) for submit in submits] == [None] * len(submits)
    return drain(made)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_generate_in_any_company(
    artifact: Path, generator: Any, temperature: float
) -> None:
    made = engine(artifact, generator)
    alone = run(made, request("a", IDS, 9, temperature=temperature, seed=3))["a", 0]
    beside = run(
        made,
        request("b", IDS[:2], 5, temperature=2.0),
        request("a", IDS, 9, temperature=temperature, seed=3, n=2),
    )
    assert beside["a", 0].tokens == alone.tokens
    assert len(alone.tokens) == 9
    assert alone.finish == "length"
    if not temperature:
        assert generator.generate(IDS, max_new_tokens=9) == alone.tokens
        assert beside["a", 1].tokens == alone.tokens


def test_scores_of_the_prompt_and_of_the_answer(artifact: Path, generator: Any) -> None:
    found = run(engine(artifact, generator), request("a", IDS, 2, logprobs=2, prompt_logprobs=1))["a", 0]
    whole = generator(torch.tensor([[*IDS, *found.tokens]]))[0].log_softmax(-1)
    assert found.prompt_logprobs is not None
    assert found.prompt_logprobs[0] is None
    expected = [float(whole[place, token]) for place, token in enumerate([*IDS, *found.tokens][1:])]
    scored = [*found.prompt_logprobs[1:], *found.logprobs]
    assert [one.logprob for one in scored if one] == pytest.approx(expected, abs=1e-4)
    assert run(engine(artifact, generator), request("b", IDS, 0))["b", 0].finish == "length"


def test_what_does_not_fit_is_refused_with_the_room(artifact: Path, generator: Any) -> None:
    made = engine(artifact, generator, max_queue=2)
    room = generator.room(PROMPT)
    refused = made.submit(request("a", [5] * PROMPT, room + 1))
    assert isinstance(refused, RequestRefused)
    assert f"room for {room} new ones" in refused.text or "context is" in refused.text
    assert made.submit(request("b", IDS, 2, n=2)) is None
    full = made.submit(request("c", IDS, 2))
    assert isinstance(full, RequestRefused)
    assert full.reason == "queue_full"
    drain(made)


def test_cancelling_frees_the_place(artifact: Path, generator: Any) -> None:
    made = engine(artifact, generator, kv_memory=generator.cache_bytes)
    results: Results = {}
    for id in "ab":
        assert made.submit(request(id, IDS, 9)) is None
    take(results, made)
    assert made.stats().running == 1
    made.cancel(Cancel(id="a", reason="gone"))
    drain(made, results)
    assert results["a", 0].finish == "cancelled"
    assert len(results["b", 0].tokens) == 9


@pytest.mark.slow
def test_the_command_serves_such_an_artifact(artifact: Path, generator: Any) -> None:
    assert preflight(find(str(artifact)), EngineOptions()) is None
    with command(str(artifact)) as running, httpx.Client(base_url=running.url, timeout=120) as http:
        found = http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 6, "temperature": 0})
        assert found.status_code == 200, found.text
        assert found.json()["choices"][0]["text"] == generator.generate("Hello", max_new_tokens=6)
        chat = {
            "messages": [{"role": "user", "content": "a"}],
            "structured_outputs": {"choice": ["yes", "no"]},
        }
        answered = http.post("/v1/chat/completions", json=chat)
        assert answered.status_code == 200, answered.text
        assert answered.json()["choices"][0]["message"]["content"] in ("yes", "no")
        too_long = http.post("/v1/completions", json={"prompt": "a" * 500, "max_tokens": 1})
        assert too_long.status_code == 400


@pytest.mark.slow
def test_the_command_serves_a_folder_that_transformers_runs(tmp_path: Path) -> None:
    folder = save(causal("GPT2", num_key_value_heads=4), tmp_path)
    assert preflight(find(str(folder)), EngineOptions()) is None
    expected = open_model(str(folder))
    assert "GPT2LMHeadModel" in expected.notices[0]
    answer = ask(expected.model, "Hello", max_new_tokens=6, on_text=lambda text: None)
    with command(str(folder)) as running, httpx.Client(base_url=running.url, timeout=120) as http:
        body = {"prompt": "Hello", "max_tokens": 6, "temperature": 0}
        found = http.post("/v1/completions", json=body)
        assert found.status_code == 200, found.text
        whole = found.json()
        assert whole["choices"][0]["text"] == answer.text
        assert whole["usage"]["completion_tokens"] == answer.new_tokens
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            pieces = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        assert "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"]) == answer.text
        assert len(answer.text) > 1
        stopped = http.post("/v1/completions", json=body | {"stop": [answer.text[1]]}).json()
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert stopped["choices"][0]["text"] == answer.text.partition(answer.text[1])[0]
        assert http.post("/v1/completions", json=body | {"max_tokens": 9999}).status_code == 400
