"""Tasks on tiny models: the same answers as the model gives when it is called, each row's fault its own."""

from __future__ import annotations

import json
import struct
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import torch

from folders import SENTENCES, encoder, eval_text, save, sentence_transformer, write_json
from text_artifacts import eager_artifact
from torchwright.map.model import ModelKind, find_model
from torchwright.map.options import ModelOptions, TaskName, TaskOptions
from torchwright.map.tasks.base import Answer, Rejected, Task, TaskSpec
from torchwright.map.tasks.registry import open_task
from torchwright.optimization.artifact.load import load
from torchwright.workloads.encoder import EncoderWorkload, SentenceEncoder, open_text_encoder, read_pipeline
from torchwright.workloads.huggingface import load_model

HEAD = "ForSequenceClassification"
LONG = " ".join(SENTENCES) * 3
TOKENS = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "cls_token": "<s>"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sentence-transformers."""
    path = tmp_path_factory.mktemp("encoder") / "folder"
    return sentence_transformer(path, encoder(), pooling={"pooling_mode_mean_tokens": True})


@pytest.fixture(scope="module")
def artifact(folder: Path) -> Path:
    workload = EncoderWorkload(folder, batch=4, tokens=40, eval_text=eval_text(folder.parent / "eval.txt"))
    return eager_artifact(workload, folder.parent / "artifact")


def task(target: Path, name: TaskName, **options: Any) -> Task:
    found = find_model(str(target), name)
    spec = TaskSpec(
        task=name,
        kind=found.kind,
        folder=str(found.folder),
        artifact=str(found.artifact) if found.artifact else None,
        model=ModelOptions(model=str(target)),
        options=TaskOptions(**{"text_column": "text", **options}),
        name=found.name,
    )
    return open_task(spec)


def answers(task: Task, rows: list[dict[str, Any]]) -> list[Answer]:
    found = dict(task.answer(rows))
    assert len(found) == len(rows)
    return [found[place] for place in range(len(rows))]


@pytest.mark.slow
def test_embeddings_are_those_of_the_artifact(artifact: Path) -> None:
    texts = [sentence[: 5 + 7 * n] for n, sentence in enumerate(SENTENCES[:6])]
    wanted_NE = torch.stack([load(artifact).model.encode(text[:25]) for text in texts])
    found = answers(task(artifact, "embed"), [{"text": text[:25]} for text in texts])
    found_NE = torch.tensor([row["embedding"] for row in found if isinstance(row, dict)])
    torch.testing.assert_close(found_NE, wanted_NE, rtol=1e-5, atol=1e-6)


def test_a_folder_embeds_without_a_search_as_transformers_does(folder: Path) -> None:
    pipeline = read_pipeline(folder)
    slow = SentenceEncoder(load_model(folder, "AutoModel"), pipeline.mode, pipeline.normalize)
    fast = open_text_encoder(folder)
    for text in ("a", SENTENCES[0], LONG):
        inputs = fast.tokens.of([text])
        with torch.no_grad():
            wanted_1E = slow(inputs["input_ids"], inputs["attention_mask"])
        torch.testing.assert_close(fast.encode([text]), wanted_1E, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_text_that_is_too_long_is_rejected_alone_or_cut(artifact: Path) -> None:
    rows = [{"text": "short"}, {"text": LONG}, {"text": "also short"}, {"text": None}]
    alone = answers(task(artifact, "embed"), [rows[0], rows[2]])
    first, long, third, none = answers(task(artifact, "embed"), rows)
    assert [first, third] == alone
    assert isinstance(long, Rejected)
    assert "--truncate cuts it" in long.reason
    assert none == Rejected("there is no 'text'")
    cut = answers(task(artifact, "embed", truncate=True), rows)
    assert cut[0] == first
    assert isinstance(cut[1], dict)


@pytest.mark.slow
def test_a_cosine_for_each_pair(artifact: Path) -> None:
    texts = [sentence[:20] for sentence in SENTENCES[:3]]
    rows = [{"text": texts[0], "pair": text} for text in (*texts, LONG)]
    found = answers(task(artifact, "score", pair_column="pair"), rows)
    model = load(artifact).model
    for row, text in zip(found, texts, strict=False):
        assert isinstance(row, dict)
        wanted = torch.cosine_similarity(model.encode(texts[0]), model.encode(text), dim=0).item()
        assert row["score"] == pytest.approx(wanted, abs=1e-5)
    assert isinstance(found[3], Rejected)


@pytest.mark.parametrize("labels", [1, 3])
def test_classes_and_scores_are_those_of_the_model(tmp_path: Path, labels: int) -> None:
    folder = save(encoder(head=HEAD, num_labels=labels), tmp_path / "folder")
    write_json(folder / "tokenizer_config.json", TOKENS)
    texts = [sentence[:20] for sentence in SENTENCES[:3]]
    if labels == 1:
        rows = [{"text": texts[0], "pair": text} for text in texts]
        scores = [
            row["score"]
            for row in answers(task(folder, "score", pair_column="pair"), rows)
            if isinstance(row, dict)
        ]
        assert len(scores) == 3
        assert all(0 < score < 1 for score in scores)
        return
    opened = task(folder, "classify", all_labels=True)
    found = answers(opened, [{"text": text} for text in texts])
    from torchwright.workloads.forward import open_text_model

    wanted: Any = open_text_model(folder).classify(texts)
    for row, other in zip(found, wanted, strict=True):
        assert isinstance(row, dict)
        assert row["label"] == other["label"]
        assert row["score"] == pytest.approx(other["score"], abs=1e-5)
        assert sum(row["scores"].values()) == pytest.approx(1.0, abs=1e-5)


def test_an_answer_that_is_not_a_number_is_rejected(folder: Path, tmp_path: Path) -> None:
    broken = encoder()
    broken.embeddings.word_embeddings.weight.data[:] = float("nan")
    path = sentence_transformer(tmp_path / "nan", broken, pooling={"pooling_mode_mean_tokens": True})
    assert answers(task(path, "embed"), [{"text": "x"}]) == [Rejected("the model's answer is not a number")]


def test_embeddings_of_a_batch_file(artifact: Path) -> None:
    opened = task(artifact, "openai")
    head = {"method": "POST", "url": "/v1/embeddings"}
    rows: list[dict[str, Any]] = [
        {**head, "custom_id": "one", "body": {"input": "short"}},
        {
            **head,
            "custom_id": "two",
            "body": {"input": ["short", "longer text"], "encoding_format": "base64"},
        },
        {**head, "custom_id": "long", "body": {"input": ["short", LONG]}},
        {**head, "custom_id": "empty", "body": {"input": ""}},
        {**head, "custom_id": "model", "body": {"input": "x", "model": "another"}},
        {**head, "custom_id": "field", "body": {"input": "x", "dimension": 3}},
        {"method": "GET", "url": "/v1/embeddings", "custom_id": "get", "body": {}},
        {"method": "POST", "url": "/v1/chat/completions", "custom_id": "url", "body": {}},
        {"method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}},
    ]
    one, two, *failed = answers(opened, rows)
    assert isinstance(one, dict)
    assert isinstance(two, dict)
    vector = one["response"]["body"]["data"][0]["embedding"]
    assert (
        one["response"]["body"]["usage"]["prompt_tokens"] == len("short") + 2
    )  # a token per byte, and two around it
    raw = b64decode(two["response"]["body"]["data"][0]["embedding"])
    assert struct.unpack(f"<{len(vector)}f", raw) == pytest.approx(vector, abs=1e-6)
    statuses = []
    for row in failed:
        assert isinstance(row, Rejected)
        assert row.body is not None
        json.dumps(row.body)
        statuses.append(row.body["response"]["status_code"])
    assert statuses == [400, 400, 404, 400, 400, 404, 400]


@pytest.mark.parametrize(
    ("kind", "asked", "wanted"),
    [
        ("encoder", "classify", "a sentence encoder, which does not classify"),
        ("encoder", "generate", "--task embed"),
    ],
)
def test_a_task_that_the_model_does_not_do_is_refused(
    folder: Path, kind: ModelKind, asked: TaskName, wanted: str
) -> None:
    from torchwright.core.errors import ModelError

    assert find_model(str(folder), None).kind == kind
    with pytest.raises(ModelError, match=wanted):
        find_model(str(folder), asked)


def test_the_digest_of_a_folder_is_its_weights_and_settings(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    digest = find_model(str(copy), None).digest
    assert digest == find_model(str(folder), None).digest
    write_json(copy / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    assert find_model(str(copy), None).digest != digest
    sentence_transformer(copy, encoder("Roberta"), pooling={"pooling_mode_mean_tokens": True})
    assert find_model(str(copy), None).digest != digest
