"""The real MiniLM behind /v1/embeddings: the `openai` client gets what sentence-transformers computes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from http_support import Command, command

from torchwright.workloads.encoder import EncoderWorkload
from torchwright.workloads.language import BUNDLED

sys.path.append(str(Path(__file__).parents[1]))
from folders import minilm
from text_artifacts import eager_artifact

pytestmark = pytest.mark.slow
"""`test_process` embeds by the engine, `test_http_trouble` over HTTP, and `test_workload_encoder` compares with
sentence-transformers."""
TEXTS = [
    "A cat sleeps on the warm stove.",
    "The kitten is taking a nap by the fire.",
    "Interest rates rose again in the last quarter.",
    "Ein kurzer Satz: schön und gut — 🙂",
    "word " * 150,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """MiniLM in float32, as `optimize` leaves an encoder that nothing made faster."""
    folder = tmp_path_factory.mktemp("served")
    workload = EncoderWorkload(minilm(), batch=4, tokens=256, eval_text=BUNDLED / "calibration.txt")
    eager_artifact(workload, folder / "minilm")
    with command(str(folder / "minilm")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Command) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def test_embeddings_are_those_of_sentence_transformers(client: openai.OpenAI) -> None:
    from sentence_transformers import SentenceTransformer

    expected_NE = SentenceTransformer(str(minilm()), device="cpu").encode(TEXTS)
    # The client asks for base64 by itself; `float` is asked for by name.
    coded = client.embeddings.create(model="minilm", input=TEXTS)
    plain = client.embeddings.create(model="minilm", input=TEXTS, encoding_format="float")
    assert [item.index for item in coded.data] == list(range(len(TEXTS)))
    coded_NE = np.array([item.embedding for item in coded.data], np.float32)
    plain_NE = np.array([item.embedding for item in plain.data], np.float32)
    np.testing.assert_array_equal(coded_NE, plain_NE)
    norms_N = np.linalg.norm(plain_NE, axis=1) * np.linalg.norm(expected_NE, axis=1)
    cosines_N = (plain_NE * expected_NE).sum(1) / norms_N
    assert cosines_N.min() > 0.9999
    assert coded.usage.prompt_tokens == coded.usage.total_tokens > 150
    assert plain_NE[0] @ plain_NE[1] > plain_NE[0] @ plain_NE[2] + 0.3


@pytest.mark.plain("/v2/rerank")
@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_their_cosine(server: Command, path: str) -> None:
    from sentence_transformers import SentenceTransformer, util

    model = SentenceTransformer(str(minilm()), device="cpu")
    query, *documents = TEXTS
    wanted = util.cos_sim(model.encode(query), model.encode(documents))[0].tolist()
    body = {"query": query, "documents": [documents[0], {"text": documents[1]}, *documents[2:]], "top_n": 3}
    found = httpx.post(server.url + path, json=body).json()
    order = sorted(range(len(documents)), key=lambda index: -wanted[index])[:3]
    assert [row["index"] for row in found["results"]] == order
    assert [row["document"]["text"] for row in found["results"]] == [documents[index] for index in order]
    for row in found["results"]:
        assert row["relevance_score"] == pytest.approx(wanted[row["index"]], abs=1e-4)
    scored = httpx.post(server.url + "/v1/score", json={"text_1": query, "text_2": documents}).json()
    assert [row["score"] for row in scored["data"]] == pytest.approx(wanted, abs=1e-4)
    assert scored["usage"] == found["usage"]
    refused = httpx.post(server.url + "/v1/classify", json={"input": "x"})
    assert "no classifier" in refused.json()["error"]["message"]


def test_one_text_is_embedded_as_in_a_list(client: openai.OpenAI) -> None:
    one, among = (client.embeddings.create(model="minilm", input=text).data for text in (TEXTS[0], TEXTS))
    np.testing.assert_allclose(one[0].embedding, among[0].embedding, atol=1e-5)


def test_what_an_encoder_does_not_do_is_refused(client: openai.OpenAI, server: Command) -> None:
    with pytest.raises(openai.BadRequestError, match="the model's own size"):
        client.embeddings.create(model="minilm", input="x", dimensions=64)
    with pytest.raises(openai.BadRequestError, match="at most 256 items"):
        client.embeddings.create(model="minilm", input=["x"] * 257)
    with pytest.raises(openai.BadRequestError, match="at least 1 character"):
        client.embeddings.create(model="minilm", input="")
    with pytest.raises(openai.BadRequestError, match="token ids are not embedded"):
        client.embeddings.create(model="minilm", input=[1, 2, 3])
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.embeddings.create(model="other", input="x")
    with pytest.raises(openai.BadRequestError, match="a sentence encoder: use /v1/embeddings"):
        client.completions.create(model="minilm", prompt="x")
    assert len(client.embeddings.create(model="minilm", input=["x"] * 20).data) == 20
    (served,) = httpx.get(server.url + "/v1/models").json()["data"]
    assert served["id"] == "minilm"
    with pytest.raises(openai.BadRequestError, match="longer than this model was optimized for"):
        client.embeddings.create(model="minilm", input="word " * served["max_model_len"])
