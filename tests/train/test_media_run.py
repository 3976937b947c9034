"""Runs over pictures and sounds: what they learn, resumed bit for bit, on several processes, loaded by transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from media_runs import CLASSES, draw, make_classifier, make_images, make_speech
from runs import assert_same, checkpoints, losses, run_processes, state

from torchwright.train.kinds import kind_of, verb
from torchwright.train.media.config import read_images, read_speech
from torchwright.train.media.images import ImageTask, list_pictures
from torchwright.train.media.samples import Samples
from torchwright.train.media.sounds import SpeechTask, list_spoken
from torchwright.train.run.observe.metrics import read_figures
from torchwright.train.run.runtime.checkpoint import CheckpointError


def train(run: Path, **how: Any) -> Any:
    return verb(kind_of(run), "train")(run, live=False, **how)


def copy_until(run: Path, step: int, folder: Path) -> Path:
    """The run as it was when the checkpoint of `step` was its last."""
    shutil.copytree(run.parent, folder)
    copied = folder / "run.toml"
    for later in checkpoints(copied):
        if int(later.name[5:]) > step:
            shutil.rmtree(later)
    shutil.rmtree(folder / "out" / "model")
    return copied


MAKERS = {
    "vit": make_images,
    "resnet": lambda folder, **changes: make_images(folder, norms=True, **changes),
    "whisper": make_speech,
}


@pytest.mark.plain("resnet")
@pytest.mark.parametrize("kind", MAKERS)
def test_resuming_equals_not_stopping(tmp_path: Path, kind: str) -> None:
    """Weights, what batch norms noted, the optimizer's state and losses, bit for bit, over the end of the files."""
    changes: dict[str, Any] = {
        "data": {"train": ["train"], "validation": ["held"], "augment": ["crop", "flip"]}
    }
    run = MAKERS[kind](tmp_path / "whole", **(changes if kind != "whisper" else {}))
    outcome = train(run)
    assert outcome.steps == 6
    again = copy_until(run, 2, tmp_path / "again")
    (again.parent / "out" / "metrics.jsonl").unlink()
    train(again, resume=True)
    assert_same(state(checkpoints(again)[-1]), state(checkpoints(run)[-1]))
    assert losses(again) == {step: loss for step, loss in losses(run).items() if step > 2}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["resnet", "whisper"])
def test_two_processes_take_one_processes_steps(tmp_path: Path, kind: str) -> None:
    """The same losses to rounding; of batch norms, whose means are each process's own, alike alone."""
    one = MAKERS[kind](tmp_path / "one")
    train(one)
    two = MAKERS[kind](tmp_path / "two", layout={"dp_shard": 2}, micro_batches=1)
    for code, told in run_processes(two, world=2):
        assert code == 0, told
    if kind == "whisper":
        assert [*losses(two).values()] == pytest.approx([*losses(one).values()], rel=2e-4)
    else:
        assert losses(two)[1] == pytest.approx(losses(one)[1], rel=1e-4), "halves are its micro-batches"
        assert losses(two).keys() == losses(one).keys()
    again = copy_until(two, 4, tmp_path / "again")
    for code, told in run_processes(again, world=2, resume=True):
        assert code == 0, told
    assert losses(again) == losses(two)


def test_a_step_is_transformers_own(tmp_path: Path) -> None:
    """Loss, gradient norm and the weights after AdamW's first step, against a loop written out."""
    import transformers

    run_file = make_images(tmp_path, samples=8, micro_batches=1, clip=False)
    train(run_file)
    run = read_images(run_file)
    listed = list_pictures(run, tmp_path)
    samples = Samples(
        listed.train.items, ImageTask(tmp_path / "base", run.data, listed.labels), 0, strict=True
    )
    batch = samples.batch(0, 8)
    model: Any = transformers.ViTForImageClassification.from_pretrained(tmp_path / "base").train()
    loss = F.cross_entropy(model(**batch.inputs).logits, batch.labels)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    figures = read_figures(tmp_path / "out")[1]
    assert figures["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert figures["grad_norm"] == pytest.approx(float(norm.detach()), rel=1e-4)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.999)).step()
    kept: Any = transformers.ViTForImageClassification.from_pretrained(tmp_path / "out" / "model")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(kept.state_dict()[name], value, rtol=1e-3, atol=2e-5)


def test_the_loss_of_speech_is_transformers_own(tmp_path: Path) -> None:
    """Which makes the decoder's inputs of the labels itself."""
    import transformers

    run_file = make_speech(tmp_path, samples=4)
    train(run_file)
    run = read_speech(run_file)
    listed = list_spoken(run, tmp_path)
    task = SpeechTask(tmp_path / "base", run.data)
    batch = Samples(listed.train.items, task, 0, strict=True).batch(0, 4)
    model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "base").train()
    loss = model(input_features=batch.inputs["input_features"], labels=batch.labels).loss
    assert losses(run_file)[1] == pytest.approx(float(loss.detach()), rel=1e-5)
    words = task.tokenizer.decode([i for i in batch.labels[0].tolist() if i >= 0], skip_special_tokens=False)
    assert words.startswith("<|en|><|transcribe|><|0.00|> ")
    assert words.endswith("<|endoftext|>")


@pytest.mark.slow
def test_a_classifier_learns_what_it_is_shown(tmp_path: Path) -> None:
    """And the folder that it leaves tells new pictures apart by transformers' own code, under the names of classes."""
    import transformers

    run = make_images(tmp_path, each=24, norms=True, samples=60 * 24, batch=24, micro_batches=1)
    shutil.rmtree(tmp_path / "base")
    make_classifier(tmp_path / "base", norms=True, labels=5)  # another head: it is made anew
    outcome = train(run)
    assert outcome.held_out["validation_accuracy"] >= 0.8
    model: Any = transformers.AutoModelForImageClassification.from_pretrained(outcome.model)
    processor: Any = transformers.AutoImageProcessor.from_pretrained(outcome.model)
    assert list(model.config.id2label.values()) == list(CLASSES)
    random = np.random.default_rng(7)
    right = 0
    for number in range(30):
        kind = CLASSES[number % 3]
        with torch.no_grad():
            logits = model(**processor(images=draw(kind, random), return_tensors="pt")).logits
        right += model.config.id2label[int(logits.argmax())] == kind
    assert right >= 24


@pytest.mark.slow  # its steps and its loss are held against transformers
def test_a_recognizer_learns_what_it_is_told(tmp_path: Path) -> None:
    run = make_speech(tmp_path, count=16, samples=30 * 8, batch=8)
    train(run)
    assert losses(run)[30] < 0.7 * losses(run)[1]


@pytest.mark.slow
def test_the_word_error_rate_is_of_what_transcribe_writes(tmp_path: Path) -> None:
    from torchwright.models.speech.load import load_speech
    from torchwright.models.speech.score import normalizer, word_errors

    run = make_speech(tmp_path, count=32, samples=50 * 16, batch=16, evaluation={"transcribed": 4})
    outcome = train(run)
    recognizer = load_speech(outcome.model)
    rows = [json.loads(line) for line in (tmp_path / "held.jsonl").read_text().splitlines()]
    found = [recognizer.transcribe(tmp_path / row["audio"], language="en").text for row in rows]
    words, errors = word_errors([row["text"] for row in rows], found, normalizer("en"))
    assert outcome.held_out["word_error_rate"] == errors.sum() / words.sum()


def test_what_would_be_another_run_is_refused(tmp_path: Path) -> None:
    run = make_images(tmp_path, samples=8)
    train(run)
    text = run.read_text()
    run.write_text(text.replace("lr = 0.003", "lr = 0.004"))
    with pytest.raises(CheckpointError, match=r"optimizer\.lr: 0.003 → 0.004"):
        train(run)
    run.write_text(text.replace("samples = 8", "samples = 16"))
    (tmp_path / "train" / "disc" / "000.png").unlink()
    with pytest.raises(CheckpointError, match="train_samples: 36 → 35"):
        train(run)
