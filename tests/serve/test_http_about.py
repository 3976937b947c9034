"""What a server says of itself: the fields by which gateways know vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

import httpx
import pytest
from fake_engine import CONTEXT, Trouble
from http_support import MODEL, Running, serving

from torchwright.serve.limits import Limits


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def test_the_model_is_listed_as_by_vllm(http: httpx.Client) -> None:
    (card,) = http.get("/v1/models").json()["data"]
    assert card == http.get(f"/v1/models/{MODEL}").json()
    assert (card["id"], card["object"], card["parent"]) == (MODEL, "model", None)
    assert (card["owned_by"], card["max_model_len"]) == ("torchwright", CONTEXT)
    assert card["root"].endswith("bundled")
    (permission,) = card["permission"]
    assert (permission["object"], permission["allow_sampling"]) == ("model_permission", True)
    assert http.get("/version").json() == {"version": version("torchwright")}


def test_a_model_is_served_under_every_name_it_was_given() -> None:
    with (
        serving(aliases=["gpt-4o", "qwen"]) as running,
        httpx.Client(base_url=running.url, timeout=30) as http,
    ):
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == [MODEL, "gpt-4o", "qwen"]
        assert http.get("/v1/models/qwen").json()["id"] == "qwen"
        body = {"prompt": "a", "max_tokens": 1, "model": "gpt-4o"}
        answer = http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["model"]) == (200, MODEL)
        refused = http.post("/v1/completions", json=body | {"model": "llama"})
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            404,
            f"there is no model 'llama'; '{MODEL}', 'gpt-4o', 'qwen' are served",
        )


@pytest.mark.parametrize(
    ("path", "old"), [("/server_info", "/get_server_info"), ("/model_info", "/get_model_info")]
)
def test_it_is_described_as_by_sglang(http: httpx.Client, path: str, old: str) -> None:
    found = http.get(path).json()
    assert found == http.get(old).json()
    assert found["model_path"] == found["tokenizer_path"]
    expected = {
        "/server_info": {
            "served_model_name": MODEL,
            "context_length": CONTEXT,
            "max_total_tokens": 256 * 16,
            "max_running_requests": 64,
            "tp_size": 1,
            "is_embedding": False,
        },
        "/model_info": {
            "is_generation": True,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "weight_version": "fake",
            "has_image_understanding": False,
        },
    }
    assert found.items() >= expected[path].items()


def test_the_load_is_told_in_both_forms(http: httpx.Client) -> None:
    body = {"prompt": "some words", "max_tokens": 1000, "ignore_eos": True, "priority": Trouble.SLOW}
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        found = http.get("/v1/loads?include=core,queues").json()
        assert found["dp_rank_count"] == 1
        (load,) = found["loads"]
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (1, 0, 1)
        assert load["num_used_tokens"] == 16  # the fake's one page
        assert load["token_usage"] == 16 / load["max_total_num_tokens"]
        assert http.get("/loads").json()["loads"] == found["loads"]
        old = {"dp_rank": 0, "num_reqs": 1, "num_waiting_reqs": 0, "num_tokens": 16}
        assert http.get("/get_load").json() == [old]
        assert http.get("/load").json() == {"server_load": 1}


def test_a_probe_makes_the_engine_compute() -> None:
    with serving() as fresh:
        assert httpx.get(fresh.url + "/health_generate").status_code == 200
        stats = fresh.service.client.stats
        assert stats is not None
        assert stats.generated_tokens == 1


def test_a_probe_that_takes_too_long_fails() -> None:
    with serving(limits=Limits(probe_seconds=0.0)) as impatient:
        response = httpx.get(impatient.url + "/health_generate")
    assert response.status_code == 503
    assert "computed nothing within 0 s" in response.json()["error"]["message"]


def test_a_conversation_is_tokenized_with_its_tools(http: httpx.Client) -> None:
    """The tokens are those that a chat completion of the same conversation counts."""
    tool = {"type": "function", "function": {"name": "add", "description": "Adds."}}
    body = {"messages": [{"role": "user", "content": "What is 1 + 2?"}], "tools": [tool]}
    found = http.post("/tokenize", json=body).json()
    answer = http.post("/v1/chat/completions", json=body | {"max_tokens": 1}).json()
    assert len(found["tokens"]) == found["count"] == answer["usage"]["prompt_tokens"]
    assert found["max_model_len"] == CONTEXT
    assert found["count"] > http.post("/tokenize", json={"messages": body["messages"]}).json()["count"]
    refused = http.post("/tokenize", json={"prompt": "a", "tools": [tool]})
    assert "are for messages" in refused.json()["error"]["message"]


def test_an_encoder_is_probed_by_a_text() -> None:
    with serving(kind="encoder") as encoder:
        assert httpx.get(encoder.url + "/health_generate").status_code == 200
        assert httpx.get(encoder.url + "/server_info").json()["is_embedding"]
        assert not httpx.get(encoder.url + "/model_info").json()["is_generation"]
