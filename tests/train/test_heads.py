"""Heads: classes and vectors of texts, against transformers and sentence-transformers, whole runs, what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import SMALL, WORDS, small_model
from runs import assert_same, checkpoints, make_run, run_processes, state

from torchwright.cli import main
from torchwright.models.decoder.families import decoder_config
from torchwright.train.data.shards import DataError
from torchwright.train.model import Transformer
from torchwright.train.model.vocabulary import IGNORE
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.objective_section import Head
from torchwright.train.run.config.read import read_run
from torchwright.train.run.loop.train import train
from torchwright.train.run.objectives.heads import Vectors, class_of_transformers
from torchwright.train.run.objectives.objective import MicroBatch
from torchwright.train.run.observe.history import read_history
from torchwright.train.run.observe.metrics import read_figures
from torchwright.train.run.runtime.processes import processes

HEADS: dict[str, dict[str, Any]] = {
    "classification": {"kind": "classification", "labels": ["sky", "land"]},
    "embedding": {"kind": "embedding", "temperature": 0.1},
    "last": {"kind": "embedding", "pooling": "last"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("base"))


def rows_of(kind: str, count: int = 24) -> list[dict[str, Any]]:
    rng = np.random.default_rng()
    rows: list[dict[str, Any]] = []
    for number in range(count):
        one, other = rng.choice(WORDS, 2, replace=False)
        if kind == "classification":
            sky = one in ("sun", "moon", "bird", "cloud")
            # A class by its name or by its place.
            label = ("sky" if sky else "land") if number % 2 else int(not sky)
            rows.append({"text": f"{one} near 1{number}", "label": label})
        else:
            rows.append(
                {"anchor": f"{one} and {other} {number}", "positive": f"{number}: the {other}, {one}"}
            )
    return rows


def head_run(folder: Path, base: Path, name: str, **changes: Any) -> Path:
    head = HEADS[name]
    if not (folder / "rows.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        rows = rows_of(head["kind"])
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {
        "model": {"folder": str(base)},
        "data": {"train": ["rows.jsonl"], "validation": ["rows.jsonl"]},
        "head": head,
        "context": 64,
        "batch_tokens": 512,
        "tokens": 8 * 512,
        "micro_batches": 1,
        "checkpoint": {"every_steps": 7},
    }
    return make_run(folder, **given | changes)


@pytest.mark.plain("embedding")
@pytest.mark.parametrize("name", HEADS)
def test_a_run_learns_and_goes_on_bit_for_bit_and_others_load_it(
    tmp_path: Path, base: Path, name: str
) -> None:
    """The held-out loss is what transformers, or sentence-transformers, computes of the written folder: 1e-4."""
    run = head_run(tmp_path, base, name)
    outcome = train(run, live=False)
    assert outcome.model
    assert outcome.validation_loss is not None
    figures = read_figures(tmp_path / "out")
    assert outcome.validation_loss < figures[1]["loss"]
    wanted = state(checkpoints(run)[-1])
    shutil.rmtree(checkpoints(run)[-1])
    assert train(run, resume=True, live=False).loss == outcome.loss
    assert_same(wanted, state(checkpoints(run)[-1]))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    if name == "classification":
        loss, right = by_transformers(outcome.model, rows)
        assert figures[8]["validation_accuracy"] == pytest.approx(right)
    else:
        loss, right = by_sentence_transformers(outcome.model, rows, HEADS[name].get("temperature", 0.05))
        assert figures[8]["validation_recall_at_1"] == pytest.approx(right)
    assert outcome.validation_loss == pytest.approx(loss, rel=1e-4)


@torch.no_grad()
def by_transformers(folder: Path, rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean cross-entropy and accuracy, of texts that are padded together."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.config.id2label == {0: "sky", 1: "land"}
    tokenizer = AutoTokenizer.from_pretrained(folder, pad_token="<|end|>", padding_side="right")
    inputs = tokenizer([row["text"] for row in rows], return_tensors="pt", padding=True)
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    labels = torch.tensor([model.config.label2id.get(row["label"], row["label"]) for row in rows])
    loss = torch.nn.functional.cross_entropy(logits, labels)
    return loss.item(), (logits.argmax(-1) == labels).double().mean().item()


def by_sentence_transformers(
    folder: Path, rows: list[dict[str, Any]], temperature: float
) -> tuple[float, float]:
    """InfoNCE over all pairs and recall at 1."""
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="loads the written folder")
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    model.tokenizer.pad_token = "<|end|>"
    one, other = (
        torch.from_numpy(model.encode([row[part] for row in rows])) for part in ("anchor", "positive")
    )
    torch.testing.assert_close(one.norm(dim=-1), torch.ones(len(one)))
    scores = one @ other.T / temperature
    own = torch.arange(len(rows))
    return torch.nn.functional.cross_entropy(scores, own).item(), (
        scores.argmax(-1) == own
    ).double().mean().item()


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_those_of_texts_by_themselves(pooling: Any) -> None:
    """float64, 1e-12: pooled states and the loss of packed texts against one text at a time."""
    model = Transformer(decoder_config(SMALL, "test")).double()
    model.reset_parameters(2)
    lengths = torch.randint(1, 7, (8,)).tolist()
    texts = [torch.randint(2, 4096, (length,)) for length in lengths]
    ids, labels, documents = (torch.zeros(2, 40, dtype=torch.int64) for _ in range(3))
    labels[:] = IGNORE
    for row in (0, 1):
        place = 0
        for text in texts[4 * row : 4 * row + 4]:
            here = slice(place, place + len(text))
            ids[row, here], documents[row, here], labels[row, here.stop - 1] = text, place, 0
            place += len(text)
        documents[row, place:] = place
    batch = MicroBatch(
        ids_BT=ids, labels_BT=labels, positions_BT=torch.arange(40) - documents, documents_BS=documents
    )
    objective = Vectors(model, Head(kind="embedding", pooling=pooling))
    hidden = [model.hidden(text[None])[0] for text in texts]
    slow = torch.stack([states.mean(0) if pooling == "mean" else states[-1] for states in hidden])
    slow = slow / slow.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(objective.vectors(batch), slow, atol=1e-12, rtol=0)
    scores = (slow[::2] @ slow[1::2].T / 0.05).log_softmax(-1)
    with processes(10.0):
        loss, _ = objective(batch)
    assert objective.count(batch) == 4
    assert loss.item() == pytest.approx(-scores.diagonal().sum().item(), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classification", "embedding"])
def test_two_processes_are_one(tmp_path: Path, base: Path, name: str) -> None:
    """Losses of float32 summed in another order, 1e-4; negatives of the other process among them."""
    alone = head_run(tmp_path / "one", base, name, tokens=3 * 512)
    train(alone, live=False)
    (tmp_path / "two").mkdir()
    shutil.copy(tmp_path / "one" / "rows.jsonl", tmp_path / "two")
    both = head_run(tmp_path / "two", base, name, tokens=3 * 512, layout={"dp_shard": 2})
    for code, told in run_processes(both, world=2):
        assert code == 0, told
    other = read_figures(tmp_path / "two" / "out")
    for step, line in read_figures(tmp_path / "one" / "out").items():
        assert other[step]["loss"] == pytest.approx(line["loss"], rel=1e-4)
        assert other[step]["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-3)


def test_broken_rows_are_told_and_data_is_shown(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = head_run(tmp_path, base, "classification")
    broken = [
        ({"text": "a", "label": "sea"}, "unknown class 'sea'"),
        ({"text": "a", "label": 2}, "unknown class '2'"),
        ({"text": " ", "label": 1}, "'text' is empty"),
        ({"text": "a"}, "no 'label'"),
        ({"text": "word " * 80, "label": 1}, "a window has 64"),
    ]
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row, _ in broken)
    assert main(["data", "check", str(run), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)["files"][0]["report"]
    assert (seen["documents"], seen["trained"]) == (24, 24)
    for (number, reason), (place, (_, wanted)) in zip(
        sorted(seen["listed"]), enumerate(broken, 25), strict=True
    ):
        assert number == place
        assert wanted in reason
    assert main(["data", "check", str(run), "--strict"]) == 2
    capsys.readouterr()
    assert main(["data", "show", str(run), "--json"]) == 0
    segments = json.loads(capsys.readouterr().out)["segments"]
    assert {segment["text"] for segment in segments if segment["trained"]} <= {"sky", "land"}
    assert segments[0]["text"].startswith("<|begin|>")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": {"kind": "classification"}}, "has to name the classes"),
        ({"head": {"kind": "classification", "labels": ["a", "a"]}}, "names a class twice"),
        ({"head": {"kind": "embedding", "labels": ["a", "b"]}}, "labels is for the kind 'classification'"),
        ({"lora": {}}, "does not go with this `lora`"),
        ({"preference": {}}, "does not go with this `preference`"),
        ({"precision": "mxfp8"}, "does not go with this `precision`"),
        ({"layout": {"tp": 2}}, "does not go with this `layout`"),
    ],
)
def test_what_heads_do_not_go_with(tmp_path: Path, base: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        read_run(head_run(tmp_path, base, "classification", **changes))


def test_a_model_without_a_classifier_in_transformers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(RunError, match="no classifier of model_type 'nothing'"):
        class_of_transformers(tmp_path)


def test_rows_of_another_kind_are_refused(tmp_path: Path, base: Path) -> None:
    run = head_run(tmp_path, base, "embedding", data={"train": ["rows.jsonl"]})
    assert main(["data", "pack", str(run), "--out", str(tmp_path / "packed")]) == 0
    (shard,) = (tmp_path / "packed").glob("*.safetensors")
    (tmp_path / "other.jsonl").write_text('{"text": "a", "label": 1}\n')
    with pytest.raises(DataError, match=r"no columns that are known.*'anchor' and 'positive'"):
        train(head_run(tmp_path, base, "embedding", data={"train": ["other.jsonl"]}), live=False)
    # Without [head] the text alone is read, as it always was.
    plain = make_run(
        tmp_path / "plain",
        model={"folder": str(base)},
        data={"train": ["../other.jsonl"], "packing": "documents"},
        tokens=256,
    )
    assert math.isfinite(train(plain, live=False).loss or math.nan)
    plain = make_run(tmp_path / "wrong", model={"folder": str(base)}, data={"train": [str(shard)]})
    with pytest.raises(DataError, match=r"add \[head\]"):
        train(plain, live=False)


def test_texts_too_long_for_a_ready_shard_are_told(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packed for a longer window than the run's: the class stands behind a text's end, and is lost with it."""
    rows = [*rows_of("classification"), {"text": "sun " * 80, "label": "sky"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wide = {"context": 512, "data": {"train": ["rows.jsonl"]}}
    assert (
        main(
            [
                "data",
                "pack",
                str(head_run(tmp_path, base, "classification", **wide)),
                "--out",
                str(tmp_path / "p"),
            ]
        )
        == 0
    )
    (shard,) = (tmp_path / "p").glob("*.safetensors")
    run = head_run(tmp_path, base, "classification", data={"train": [str(shard)]}, tokens=512)
    assert math.isfinite(train(run, live=False).loss or math.nan)
    (told,) = (event for event in read_history(tmp_path / "out").events if event["event"] == "long_documents")
    assert (told["cut"], told["left_out"]) == (0, 1)
    capsys.readouterr()
    assert main(["data", "check", str(run)]) == 0
    assert "1 documents would be left out" in capsys.readouterr().out
    assert main(["data", "check", str(run), "--strict"]) == 2
    with pytest.raises(DataError, match="nothing is trained on of 1 documents"):
        train(
            head_run(
                tmp_path, base, "classification", out="strict", data={"train": [str(shard)], "strict": True}
            ),
            live=False,
        )
