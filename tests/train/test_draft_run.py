"""Runs of draft heads: resumed bit for bit, over producers that die, on the target's own answers, served at the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from runs import assert_same, checkpoints, losses, run_processes, state, to_toml
from safetensors.torch import load_file
from tiny import VOCABULARY, build, save

import drafts
from folders import byte_tokenizer
from torchwright.cli import train as verb_train
from torchwright.core.errors import ModelError, TorchwrightError
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.draft import load_draft
from torchwright.train.data.shards import open_part, open_shard
from torchwright.train.draft import producers, run_head
from torchwright.train.draft.config import read_draft
from torchwright.train.draft.regenerate import PART
from torchwright.train.draft.trainer import DraftOutcome
from torchwright.train.kinds import kind_of, verb
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.runtime.checkpoint import CheckpointError

BYTES = 320
"""A vocabulary with room for `byte_tokenizer`'s tokens."""


def make_draft(folder: Path, *, model: str = "llama", vocabulary: int = VOCABULARY, **changes: Any) -> Path:
    """A run file over token shards, some of them held out, and a random target of three layers."""
    folder.mkdir(parents=True, exist_ok=True)
    save(build(model, vocab_size=vocabulary), folder / "target")
    random = np.random.default_rng(0)
    for name, size in (("a.npy", 3000), ("held.npy", 400)):
        steps = random.integers(1, 4, size)
        np.save(folder / name, (3 + np.cumsum(steps) % (VOCABULARY - 3)).astype(np.uint16))
    run: dict[str, Any] = {
        "kind": "draft",
        "out": "out",
        "tokens": 6 * 128,
        "batch_tokens": 128,
        "context": 32,
        "micro_batches": 2,
        "precision": "fp32",
        "threads": 1,
        "log_every": 1,
        "target": {"folder": "target", "dtype": "fp32"},
        "head": {"vocabulary": 64, "steps": 3},
        "data": {"train": ["a.npy"], "validation": ["held.npy"]},
        "evaluation": {"tokens": 256},
        "optimizer": {"lr": 3e-3},
        "checkpoint": {"every_steps": 2, "keep": 9},
        **changes,
    }
    path = folder / "run.toml"
    path.write_text(to_toml(run))
    return path


def train(run: Path, **how: Any) -> DraftOutcome:
    return verb(kind_of(run), "train")(run, live=False, **how)


def copy_until(run: Path, step: int, folder: Path) -> Path:
    """The run as it was when the checkpoint of `step` was its last."""
    shutil.copytree(run.parent, folder)
    copied = folder / "run.toml"
    for later in checkpoints(copied):
        if int(later.name[5:]) > step:
            shutil.rmtree(later)
    shutil.rmtree(folder / "out" / "model")
    (folder / "out" / "metrics.jsonl").unlink()
    return copied


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has reached its end."""
    run = make_draft(tmp_path_factory.mktemp("whole") / "run")
    train(run)
    return run


def test_resuming_equals_not_stopping(whole: Path, tmp_path: Path) -> None:
    """Weights, the optimizer's state, losses and the head's file, bit for bit."""
    again = copy_until(whole, 2, tmp_path / "again")
    train(again, resume=True)
    assert_same(state(checkpoints(again)[-1]), state(checkpoints(whole)[-1]))
    assert losses(again) == {step: loss for step, loss in losses(whole).items() if step > 2}
    files = [run.parent / "out" / "model" / "model.safetensors" for run in (again, whole)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_head_is_loaded_and_reported(whole: Path) -> None:
    folder = whole.parent / "out" / "model"
    draft = load_draft(folder, load_decoder(whole.parent / "target"))
    assert draft.observed == (1, 1, 2)
    report = json.loads((folder / "acceptance.json").read_text())
    assert [one["position"] for one in report["positions"]] == [1, 2, 3]
    chains = [one["chain"] for one in report["positions"]]
    assert chains == sorted(chains, reverse=True)
    assert report["accepted_tokens"] == pytest.approx(sum(chains))
    assert losses(whole)[6] < losses(whole)[1]


@pytest.mark.slow
def test_producers_that_die_change_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes compute the states; one is killed at every second step, and started again."""
    again = copy_until(whole, 2, tmp_path / "again")
    settings = {"features.producers": 2, "features.threads": 1}
    taken, found = producers.Producers.take, []

    def killing(self: producers.Producers) -> Any:
        found.append(self)
        if len(found) % 4 == 0:
            os.kill(self._producers[0].process.pid, signal.SIGKILL)
        return taken(self)

    monkeypatch.setattr(producers.Producers, "take", killing)
    train(again, resume=True, settings=settings)
    assert found[0].restarts >= 1
    assert_same(state(checkpoints(again)[-1]), state(checkpoints(whole)[-1]))
    assert losses(again) == {step: loss for step, loss in losses(whole).items() if step > 2}


@pytest.mark.slow
def test_producers_that_cannot_live_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_draft(tmp_path / "run", features={"producers": 1})
    monkeypatch.setattr(producers, "produce", _dying)
    with pytest.raises(RunError, match="died 3 times"):
        train(run)


def _dying(*_: Any) -> None:
    os._exit(3)


@pytest.mark.slow
def test_two_processes_take_one_processes_steps(whole: Path, tmp_path: Path) -> None:
    two = make_draft(tmp_path / "two", layout={"dp_shard": 2}, micro_batches=1)
    for code, told in run_processes(two, world=2):
        assert code == 0, told
    assert [*losses(two).values()] == pytest.approx([*losses(whole).values()], rel=2e-4)


def test_a_run_of_another_head_is_not_continued(whole: Path, tmp_path: Path) -> None:
    again = copy_until(whole, 2, tmp_path / "again")
    with pytest.raises(CheckpointError, match=r"head\.decay"):
        train(again, resume=True, settings={"head.decay": 0.5})
    other = build("llama")
    other.model.embed_tokens.weight.data += 1
    save(other, again.parent / "target")
    with pytest.raises(CheckpointError, match="base"):
        train(again, resume=True)


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_a_head_of_another_origin_is_trained_further(layout: str, tmp_path: Path) -> None:
    run = make_draft(tmp_path / "run", head={"start": "theirs", "steps": 3}, tokens=2 * 128)
    drafts.write_head(tmp_path / "run" / "target", tmp_path / "run" / "theirs", layout=layout)
    train(run)
    theirs = load_file(tmp_path / "run" / "theirs" / "model.safetensors")
    ours = load_file(tmp_path / "run" / "out" / "model" / "model.safetensors")
    prefix = "layers.0." if layout == "speculators" else "midlayer."
    assert {name.replace(prefix, "midlayer.") for name in theirs} == ours.keys()
    assert not ours["fc.weight"].equal(theirs["fc.weight"])
    assert ours["d2t"].equal(theirs["d2t"])
    load_draft(tmp_path / "run" / "out" / "model", load_decoder(tmp_path / "run" / "target"))


def test_a_quantized_target_trains_a_head(tmp_path: Path) -> None:
    run = make_draft(
        tmp_path / "run",
        target={"folder": "target", "dtype": "bf16"},
        tokens=2 * 128,
        precision="bf16",
    )
    train(run, settings={"target.quantize": "w8a8"})
    loaded = load_decoder(tmp_path / "run" / "target", quantize="w8a8")
    load_draft(tmp_path / "run" / "out" / "model", loaded)


def conversations(folder: Path, rows: int) -> Path:
    path = folder / "rows.jsonl"
    lines = [{"prompt": f"say {row % 7}", "completion": "text of another model"} for row in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_answers_are_the_targets_own(tmp_path: Path) -> None:
    """Greedy, behind the same prompts; a run that was stopped goes on with the next part."""
    run = make_draft(
        tmp_path / "run",
        vocabulary=BYTES,
        tokens=2 * 128,
        context=64,
        data={"train": ["rows.jsonl"], "hold_out": 0.1},
        regenerate={"tokens": 12},
    )
    folder = tmp_path / "run"
    byte_tokenizer().save(str(folder / "target" / "tokenizer.json"))
    conversations(folder, PART + 20)
    train(run)
    part = folder / "out" / "answers" / "train" / "part-000000.safetensors"
    ids, trained, starts = open_shard(part), open_part(part, "trained"), open_part(part, "starts")
    assert trained is not None
    assert starts is not None
    target = load_decoder(folder / "target")
    for begin, end in zip(starts[:5].tolist(), starts[1:6].tolist(), strict=True):
        prompt = ids[begin:end][trained[begin:end] == 0].tolist()
        answer = ids[begin:end][trained[begin:end] != 0].tolist()
        wanted = target.generate(prompt, max_new_tokens=12)
        assert answer[: len(wanted)] == wanted
        assert len(answer) <= 12
    before, kept = part.stat().st_mtime_ns, sorted(part.parent.glob("part-*"))
    last = kept[-1].read_bytes()
    kept[-1].unlink()
    train(run, fresh=False, settings={"tokens": 3 * 128})
    assert part.stat().st_mtime_ns == before, "a part that is there is not written again"
    assert kept[-1].read_bytes() == last


def test_words_make_a_run_and_the_command_says_what_it_did(tmp_path: Path) -> None:
    target = save(build("llama", vocab_size=BYTES), tmp_path / "target")
    byte_tokenizer().save(str(target / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 120)
    out = tmp_path / "out"
    words = [
        "--draft",
        "eagle3",
        "--model",
        str(target),
        "--data",
        str(tmp_path / "text.txt"),
        "-o",
        str(out),
    ]
    more = ["--set", "head.steps=2", "--set", "context=64", "--epochs", "0.3", "--quiet", "--json"]
    more += ["--set", "evaluation.served_s=0.4"]
    found = CliRunner().invoke(verb_train.command, [*words, *more], catch_exceptions=False)
    told = json.loads(found.stdout)
    assert told["model"] == str(out / "model")
    assert len(told["acceptance"]) == 2
    assert [(row["batch"], row["temperature"]) for row in told["served"]] == [
        (1, 0),
        (1, 0.8),
        (4, 0),
        (4, 0.8),
    ]
    assert json.loads((out / "model" / "acceptance.json").read_text())["served"] == told["served"]
    page = (out / "report.html").read_text()
    assert "Acceptance by position" in page
    assert "Served with the head" in page
    run = read_draft(out / "run.toml")
    assert run.head.steps == 2
    assert run.target.folder == str(target)
    assert run.optimizer.lr == pytest.approx(5e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head": {"vocabulary": 8, "start": "theirs"}}, "does not go with head.start"),
        ({"head": {"layers": [0, 1, 9]}}, "a target of 3 layers"),
        ({"context": 4, "head": {"steps": 4}}, "too short"),
        ({"features": {"threads": 2}}, "for producers"),
        ({"layout": {"tp": 2}}, "divides windows"),
        ({"head": {"method": "mtp", "layers": [1, 1, 2]}}, "for heads of EAGLE-3"),
        ({"head": {"method": "mtp"}}, "MTP layers of LlamaForCausalLM are not known"),
        ({"batch_tokens": 100}, "cannot be divided"),
        ({"optimizer": {"rate": 1.0}}, "optimizer.rate"),
        ({"context": 256, "batch_tokens": 512}, "positions reach"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(TorchwrightError, match=words):
        train(make_draft(tmp_path / "run", **changes))
    assert not (tmp_path / "run" / "out").exists()


def test_a_target_that_is_not_native_is_refused_in_words(tmp_path: Path) -> None:
    run = make_draft(tmp_path / "run")
    config = tmp_path / "run" / "target" / "config.json"
    config.write_text(
        json.dumps(
            json.loads(config.read_text()) | {"architectures": ["CTRLLMHeadModel"], "model_type": "ctrl"}
        )
    )
    with pytest.raises(ModelError, match="no draft can be trained"):
        train(run)


def test_tokens_that_the_target_lacks_are_refused(tmp_path: Path) -> None:
    run = make_draft(tmp_path / "run")
    np.save(tmp_path / "run" / "a.npy", np.full(3000, VOCABULARY, np.uint16))
    with pytest.raises(TorchwrightError, match="an id that the model does not have"):
        train(run)


def test_a_full_disk_keeps_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is not written, and the words say that nothing is lost."""
    from safetensors import SafetensorError

    run = make_draft(tmp_path / "run", tokens=2 * 128)

    def full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(run_head, "write_head", full)
        with pytest.raises(CheckpointError, match="could not be written"):
            train(run)
    assert train(run).model is not None
