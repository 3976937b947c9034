"""Cross-encoders, classifiers and reward models: what is served is what transformers and sentence-transformers give."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
import transformers
from http_support import Command, command

import torchwright as tw
from torchwright.core.errors import ModelError
from torchwright.serve.engine.embed import ServedEncoder
from torchwright.serve.engine.process import open_served
from torchwright.serve.folder import find
from torchwright.serve.http.scoring import activated
from torchwright.serve.options import EngineOptions
from torchwright.serve.wire.messages import Embed, Embedded
from torchwright.workloads.detect import kind_of
from torchwright.workloads.forward import ForwardWorkload

sys.path.append(str(Path(__file__).parents[1]))
from folders import SENTENCES, causal, encoder, eval_text, reward, save, sentence_transformer, write_json
from text_artifacts import eager_artifact

HEAD = "ForSequenceClassification"
QUERY, DOCUMENTS = SENTENCES[0][:20], [sentence[:20] for sentence in SENTENCES[1:]]
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
TALK = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "It is."}]


def artifact_of(model: Any, tmp: Path, **settings: Any) -> tuple[Path, Path]:
    """A tiny model's folder and its artifact."""
    folder = save(model, tmp / "folder")
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "cls_token": "<s>"}
    write_json(folder / "tokenizer_config.json", tokens | settings)
    workload = ForwardWorkload(folder, batch=4, tokens=120, eval_text=eval_text(tmp / "eval.txt"))
    return folder, eager_artifact(workload, tmp / "served")


def rows_of(served: ServedEncoder, texts: list[str], pairs: list[str] | None = None) -> list[list[float]]:
    assert served.submit(Embed(id="x", texts=texts, pairs=pairs)) is None
    found: dict[int, list[float]] = {}
    while not served.idle:
        part = served.step()
        assert isinstance(part, Embedded), part
        found.update(zip(part.places, part.vectors, strict=True))
    return [found[place] for place in range(len(texts))]


@pytest.mark.plain("None")
@pytest.mark.parametrize(
    "name", [None, "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"]
)
def test_scores_are_those_of_a_cross_encoder(name: str | None, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    model = encoder("Bert", HEAD, num_labels=1)
    if name is not None:
        model.config.sentence_transformers = {"activation_fn": name}
    folder, out = artifact_of(
        model, tmp_path, model_input_names=["input_ids", "token_type_ids", "attention_mask"]
    )
    served = ServedEncoder(out, tw.load(out).model, [], 512)
    assert (served.ready.kind, served.ready.labels) == ("classifier", ["LABEL_0"])
    rows = rows_of(served, [QUERY] * len(DOCUMENTS), DOCUMENTS)
    got = [activated(row, served.ready.score_activation)[0] for row in rows]
    with warnings.catch_warnings(action="ignore"):
        wanted = CrossEncoder(str(folder), device="cpu").predict([(QUERY, text) for text in DOCUMENTS])
    assert got == pytest.approx(wanted.tolist(), abs=1e-4)
    assert find(str(out)).served_as == "reader"


def test_a_folder_that_sentence_transformers_wrote_is_a_cross_encoder(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    folder = save(encoder("Bert", HEAD, num_labels=1), tmp_path / "plain")
    write_json(
        folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    )
    with warnings.catch_warnings(action="ignore"):
        model = CrossEncoder(str(folder), device="cpu", activation_fn=torch.nn.Identity())
        model.save_pretrained(str(tmp_path / "written"))
    assert (tmp_path / "written" / "modules.json").is_file()
    assert kind_of(tmp_path / "written") is ForwardWorkload
    workload = ForwardWorkload(tmp_path / "written", eval_text=eval_text(tmp_path / "eval.txt"))
    out = eager_artifact(workload, tmp_path / "served")
    assert ServedEncoder(out, tw.load(out).model, [], 512).ready.score_activation == "none"


@pytest.mark.plain("multi_label_classification")
@pytest.mark.parametrize("kind", [None, "multi_label_classification", "regression"])
def test_classes_are_those_of_transformers(kind: str | None, tmp_path: Path) -> None:
    names = {0: "sport", 1: "news", 2: "weather"}
    folder, out = artifact_of(encoder("Roberta", HEAD, id2label=names, problem_type=kind), tmp_path)
    served = ServedEncoder(out, tw.load(out).model, [], 512)
    ready = served.ready
    got = [
        dict(zip(ready.labels, activated(row, ready.activation), strict=True))
        for row in rows_of(served, DOCUMENTS)
    ]
    with warnings.catch_warnings(action="ignore"):
        pipeline = transformers.pipeline("text-classification", model=str(folder), device="cpu", top_k=None)
        wanted = pipeline(DOCUMENTS)
    for one, other in zip(got, wanted, strict=True):
        assert one == pytest.approx({row["label"]: row["score"] for row in other}, abs=1e-4)


@pytest.mark.plain("Llama")
@pytest.mark.parametrize("kind", ["Bert", "Llama"])
def test_a_classifiers_folder_is_served_as_it_is(kind: str, tmp_path: Path) -> None:
    """Long and short texts together: the folder's rows are those of its artifact."""
    folder, out = artifact_of(
        encoder("Bert", HEAD, num_labels=3) if kind == "Bert" else reward(kind), tmp_path
    )
    served = open_served(EngineOptions(model=str(folder)), cast(Any, Silent()))
    assert isinstance(served, ServedEncoder)
    texts = [*DOCUMENTS, "a", "word " * 10]
    artifact = ServedEncoder(out, tw.load(out).model, [], 512)
    torch.testing.assert_close(
        torch.tensor(rows_of(served, texts)), torch.tensor(rows_of(artifact, texts)), rtol=0, atol=1e-5
    )
    assert (served.ready.kind, served.ready.labels) == ("classifier", artifact.ready.labels)
    assert served.ready.context >= artifact.ready.context


def test_a_classifier_whose_rows_cannot_be_told_apart_is_refused(tmp_path: Path) -> None:
    folder, _ = artifact_of(reward("Llama"), tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": None}
    write_json(folder / "config.json", config)
    with pytest.raises(ModelError, match=r"LlamaForSequenceClassification without pad_token_id"):
        open_served(EngineOptions(model=str(folder)), cast(Any, Silent()))


class Silent:
    """A channel that nobody listens to."""

    def send(self, message: object) -> None: ...


def test_an_activation_that_is_not_known_is_refused(tmp_path: Path) -> None:
    model = encoder("Bert", HEAD, num_labels=1)
    model.config.sentence_transformers = {"activation_fn": "torch.nn.modules.activation.Tanh"}
    _, out = artifact_of(model, tmp_path)
    with pytest.raises(ModelError, match=r"not known.*Tanh.*Sigmoid, Identity"):
        ServedEncoder(out, tw.load(out).model, [], 512)


def test_what_answers_for_tokens_and_plain_sentence_encoders_are_not_served(tmp_path: Path) -> None:
    _, out = artifact_of(encoder("Bert", "ForTokenClassification"), tmp_path)
    with pytest.raises(ModelError, match="kind 'forward', which is not served"):
        find(str(out))
    folder = sentence_transformer(tmp_path / "st", causal("Qwen3"), pooling={"pooling_mode_lasttoken": True})
    with pytest.raises(ModelError, match=r"served as an artifact.*torchwright optimize"):
        find(str(folder))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return artifact_of(reward("Llama"), tmp_path_factory.mktemp("reward"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def server(judge: tuple[Path, Path]) -> Iterator[Command]:
    with command(str(judge[1])) as running:
        yield running


@pytest.mark.slow
def test_a_reward_model_judges_conversations_as_transformers_does(
    judge: tuple[Path, Path], server: Command
) -> None:
    folder, _ = judge
    body = {"messages": TALK, "use_activation": False}
    (row,) = httpx.post(server.url + "/v1/classify", json=body, timeout=60).json()["data"]
    with warnings.catch_warnings(action="ignore"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        plain = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=True, return_tensors="pt")[
        "input_ids"
    ]
    with torch.inference_mode():
        wanted = plain(input_ids=ids).logits[0].tolist()
    assert row["probs"] == pytest.approx(wanted, abs=1e-4)
    text = "".join(f"<s>{message['role']}: {message['content']}</s>" for message in TALK)
    other = httpx.post(server.url + "/v1/classify", json={"input": text, "use_activation": False}).json()
    assert other["data"][0]["probs"] != pytest.approx(
        wanted, abs=1e-4
    )  # its text is put between tokens once more


@pytest.mark.slow
def test_a_reward_model_is_probed_and_ranks(server: Command) -> None:
    assert httpx.get(server.url + "/health_generate", timeout=60).status_code == 200
    info = httpx.get(server.url + "/model_info").json()
    assert (info["is_generation"], info["architectures"]) == (False, ["LlamaForSequenceClassification"])
    found = httpx.post(
        server.url + "/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS}, timeout=60
    ).json()
    scores = [row["relevance_score"] for row in found["results"]]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == len(DOCUMENTS)
