"""Classes, scores and ranks as clients get them, over a fake engine whose one logit is the lengths of a pair."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_support import Running, serving

from torchwright.serve.http.scoring import activated


def logit(text: str, pair: str = "") -> float:
    return len(text) - 0.5 * len(pair)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(kind="classifier") as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
def test_classes_come_in_vllms_form(http: httpx.Client, path: str) -> None:
    found = http.post(path, json={"input": ["a", "abc"]}).json()
    assert found["object"] == "list"
    assert [row["index"] for row in found["data"]] == [0, 1]
    assert [row["probs"] for row in found["data"]] == [
        [pytest.approx(sigmoid(1))],
        [pytest.approx(sigmoid(3))],
    ]
    assert {(row["label"], row["num_classes"]) for row in found["data"]} == {("good", 1)}
    assert found["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    plain = http.post(path, json={"input": "abc", "pairs": "de", "use_activation": False}).json()
    assert plain["data"][0]["probs"] == [logit("abc", "de")]


@pytest.mark.parametrize("many", [False, True])
def test_rewards_come_in_sglangs_form(http: httpx.Client, many: bool) -> None:
    found = http.post("/classify", json={"text": ["abc", "a"] if many else "abc"}).json()
    rows = found if many else [found]
    assert [row["embedding"] for row in rows] == [[logit("abc")], [logit("a")]][: len(rows)]
    assert all(row["meta_info"]["id"] for row in rows)


def test_pooling_gives_every_label(http: httpx.Client) -> None:
    found = http.post("/pooling", json={"input": ["a", "abc"]}).json()
    assert [(row["object"], row["data"]) for row in found["data"]] == [
        ("pooling", [pytest.approx(sigmoid(1))]),
        ("pooling", [pytest.approx(sigmoid(3))]),
    ]
    plain = http.post("/pooling", json={"input": "abc", "use_activation": False, "encoding_format": "base64"})
    assert struct.unpack("<f", base64.b64decode(plain.json()["data"][0]["data"])) == (3.0,)


def test_pooling_gives_a_sentence_encoders_vectors() -> None:
    with serving(kind="encoder") as running:
        found = httpx.post(f"{running.url}/pooling", json={"input": ["abc"]}).json()
        assert found["data"][0]["data"] == [3.0, 0.5]
    with serving() as running:
        refused = httpx.post(f"{running.url}/pooling", json={"input": ["abc"]})
        assert refused.status_code == 400
        assert "no encoder and no classifier" in refused.text


def test_a_language_model_judges_by_the_probabilities_of_labels() -> None:
    """The fake engine gives every asked token the log-probability -3."""
    with serving() as running, httpx.Client(base_url=running.url, timeout=30) as http:
        body = {"query": "Is it good? ", "items": ["a b", "c d e"], "label_token_ids": [5, 6]}
        found = http.post("/v1/score", json=body).json()
        assert found["scores"] == [[pytest.approx(math.exp(-3))] * 2] * 2
        soft = http.post("/score", json=body | {"apply_softmax": True, "item_first": True}).json()
        assert soft["scores"] == [[0.5, 0.5]] * 2
        ids = http.post("/v1/score", json=body | {"query": [5, 6], "items": [[7], [8, 9]]}).json()
        assert (len(ids["scores"]), ids["usage"]["prompt_tokens"]) == (2, 7)
        for wrong in ({"items": None}, {"label_token_ids": [5000]}, {"text_1": "a"}):
            assert http.post("/v1/score", json=body | wrong).status_code == 400


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_scores_of_pairs(http: httpx.Client, names: tuple[str, str]) -> None:
    one, two = names
    found = http.post("/v1/score", json={one: "abc", two: ["d", "efgh"]}).json()
    assert [row["score"] for row in found["data"]] == [
        pytest.approx(sigmoid(logit("abc", pair))) for pair in ("d", "efgh")
    ]
    each = http.post("/score", json={one: ["a", "bc"], two: ["d", "e"], "use_activation": False}).json()
    assert [row["score"] for row in each["data"]] == [logit("a", "d"), logit("bc", "e")]


def test_documents_come_best_first(http: httpx.Client) -> None:
    body = {"query": "abc", "documents": ["longest", {"text": "de"}, "four"], "use_activation": False}
    found = http.post("/v1/rerank", json=body).json()
    assert [(row["index"], row["document"], row["relevance_score"]) for row in found["results"]] == [
        (1, {"text": "de"}, 2.0),
        (2, {"text": "four"}, 1.0),
        (0, {"text": "longest"}, -0.5),
    ]
    few = http.post("/v1/rerank", json=body | {"top_n": 1, "return_documents": False}).json()
    assert few["results"] == [{"index": 1, "relevance_score": 2.0}]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/classify", {}, "give input or messages"),
        ("/v1/classify", {"input": ["a", "b"], "pairs": "c"}, "one of pairs for each text"),
        ("/v1/classify", {"messages": [{"role": "user", "content": "x"}]}, "no chat template: give input"),
        ("/v1/score", {"text_1": "a"}, "give text_1 and text_2, or queries and documents"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "queries": "c"}, "give text_1 and text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "2 first texts and 3 second"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["x"] * 257}, "documents"),
        ("/v1/rerank", {"query": "a" * 100_001, "documents": ["x"]}, "at most 100000 characters"),
        ("/v1/embeddings", {"input": "a"}, "no sentence encoder"),
        ("/v1/completions", {"prompt": "a"}, "a classifier of text: use /v1/classify"),
    ],
)
def test_what_cannot_be_scored_is_said(
    http: httpx.Client, path: str, body: dict[str, Any], words: str
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_language_models_score_nothing() -> None:
    with serving() as decoder, httpx.Client(base_url=decoder.url, timeout=30) as http:
        for path, body in (
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
            ("/v1/classify", {"input": "a"}),
        ):
            response = http.post(path, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "wrong_model_kind")


def test_probabilities_of_large_logits_are_numbers() -> None:
    assert activated([-1000.0, 1000.0], "sigmoid") == [0.0, 1.0]
    assert activated([1000.0, 1000.0, -1000.0], "softmax") == [0.5, 0.5, 0.0]
