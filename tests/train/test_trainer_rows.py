"""Runs on rows: broken ones told, the same bits after `--resume`, mixtures, and `torchwright data`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import CONFIG, assert_same, checkpoints, losses, make_run, state

from torchwright.cli import main
from torchwright.core.errors import UnknownName
from torchwright.train.data.shards import DataError
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.read import read_run
from torchwright.train.run.loop.train import train
from torchwright.train.run.runtime.checkpoint import CheckpointError
from torchwright.workloads.texts import BUNDLED

WORDS = ["sun", "moon", "tree", "river", "stone", "bird", "cloud", "fire"]
MODEL = {"config": {**CONFIG, "vocab_size": 4096}, "tokenizer": str(BUNDLED)}


def chats(folder: Path, *, count: int = 60) -> Path:
    """Short conversations, the first of them broken."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    rows = ["{broken"]
    for _ in range(count):
        one, other = rng.choice(WORDS, 2)
        turns = (("user", f"Say {one} and {other}."), ("assistant", f"{one} {other}!"))
        rows.append(json.dumps({"messages": [{"role": role, "content": said} for role, said in turns]}))
    path = folder / "chats.jsonl"
    path.write_text("\n".join(rows))
    return path


def run_on(folder: Path, data: dict[str, Any], **changes: Any) -> Path:
    chats(folder)
    changes = {"context": 64, "model": MODEL, **changes}
    return make_run(folder, data=data, **changes)


def test_a_chat_run_tells_its_broken_row_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run = run_on(tmp_path, {"train": ["chats.jsonl"], "validation": ["chats.jsonl"]})
    outcome = train(run, live=False)
    assert outcome.validation_loss is not None
    wanted = state(checkpoints(run)[-1])
    shutil.rmtree(checkpoints(run)[-1])  # the next one continues after the step before
    assert train(run, resume=True, live=False).loss == outcome.loss
    assert_same(wanted, state(checkpoints(run)[-1]))
    assert losses(run)[6] < losses(run)[1]
    told = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    broken = next(line for line in told if line.get("event") == "broken_rows")
    assert broken["broken"] == 1
    assert broken["rows"][0][0] == 1


def test_a_run_says_what_rows_are_read_as_and_which_no_window_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quiet run reports documents that are left out, since the model learns nothing from them."""
    run = run_on(tmp_path, {"train": ["chats.jsonl"]}, tokens=256)
    long = [{"role": "user", "content": "moon " * 99}, {"role": "assistant", "content": "sun"}]
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"messages": long}))
    train(run, live=True)
    assert "chats.jsonl: read as conversations (62 rows)" in capsys.readouterr().err
    train(run, fresh=True, live=False)
    told = capsys.readouterr().err
    assert "read as" not in told
    assert "leave 1 out" in told
    assert "1 of 62 rows are broken" in told


def test_a_held_out_part_is_evaluated_and_its_best_checkpoint_stays(tmp_path: Path) -> None:
    """At a rate that destroys the model the first evaluation is the best one."""
    run = run_on(
        tmp_path,
        {"train": ["chats.jsonl"], "hold_out": 0.1},
        tokens=8 * 256,
        optimizer={"lr": 0.5},
        evaluation={"every_steps": 1},
        checkpoint={"every_steps": 1, "keep": 1},
    )
    outcome = train(run, live=False)
    told = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    found = {line["at"]: line["validation_loss"] for line in told if line.get("event") == "evaluation"}
    best = min(found, key=lambda step: found[step])
    assert (outcome.best_step, outcome.best_validation_loss) == (best, found[best])
    assert best < 8
    assert [path.name for path in checkpoints(run)] == [f"step-{best:08}", "step-00000008"]
    assert all(line["epoch"] > 0 for line in told if "step" in line)
    # The best is known again where the run goes on.
    shutil.rmtree(checkpoints(run)[-1])
    assert train(run, resume=True, live=False).best_step == best


def test_a_refused_start_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    run = run_on(tmp_path, {"train": ["chats.jsonl"]}, context=256, batch_tokens=512)
    with pytest.raises(RunError, match=r"longer than the model's positions reach.*128"):
        train(run, live=False)
    assert not (tmp_path / "out").exists()
    run = run_on(tmp_path, {"train": ["chats.jsonl"]})
    train(run, live=False)
    before = sorted(path for path in (tmp_path / "out").rglob("*"))
    run = run_on(tmp_path, {"train": ["chats.jsonl"]}, optimizer={"lr": 1e-4})
    with pytest.raises(CheckpointError, match=r"optimizer\.lr"):
        train(run, live=False)
    assert sorted(path for path in (tmp_path / "out").rglob("*")) == before
    run = run_on(tmp_path, {"train": ["chats.jsonl"], "form": "preference"}, optimizer={"lr": 1e-4})
    with pytest.raises(DataError):
        train(run, fresh=True, live=False)
    assert sorted(path for path in (tmp_path / "out").rglob("*")) == before


def test_a_warm_up_longer_than_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="warm-up is longer than the run"):
        read_run(make_run(tmp_path, schedule={"warmup_tokens": 10_000}))


def test_fields_are_set_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_on(tmp_path, {"train": ["a.npy"]})
    assert (
        main(["train", str(run), "--set", "tokens=256", "--set", "optimizer.lr=1e-5", "--json", "--quiet"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["steps"] == 1
    assert main(["train", str(run), "--set", "optimizer.rate=1"]) == 2
    assert "optimizer.rate" in capsys.readouterr().err
    assert main(["data", "check", str(run), "--set", 'data.train=["b.npy"]', "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"][0]["report"]["tokens"] == 2000


def test_sources_are_mixed_and_a_stream_refuses_what_is_partly_trained_on(tmp_path: Path) -> None:
    mixture = {
        "talk": {"files": ["chats.jsonl"], "weight": 3},
        "plain": {"files": ["a.npy", "b.npy"], "weight": 1},
    }
    run = run_on(tmp_path, {"mixture": mixture}, tokens=256)
    assert train(run, live=False).steps == 1
    run = run_on(tmp_path / "stream", {"train": ["chats.jsonl"], "packing": "stream"})
    with pytest.raises(RunError, match="packing is 'stream'"):
        train(run, live=False)
    with pytest.raises(RunError, match="either `train` or `mixture`"):
        read_run(run_on(tmp_path / "both", {"train": ["a.npy"], "mixture": mixture}))


def test_a_misspelt_field_of_a_source_is_told(tmp_path: Path) -> None:
    mixture = {"files": {"files": ["a.npy"], "weigth": 1}}
    with pytest.raises(UnknownName, match=r"data\.mixture\.files\.weigth.*did you mean"):
        read_run(run_on(tmp_path, {"mixture": mixture}))


@pytest.mark.slow
def test_check_show_and_pack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_on(tmp_path, {"train": ["chats.jsonl", "a.npy"]})
    path = str(run)
    assert main(["data", "check", path]) == 0
    printed = capsys.readouterr().out
    assert "chats.jsonl:1: no JSON" in printed.replace("\n", "")
    assert not (tmp_path / "out").exists(), "check writes nothing"
    assert main(["data", "check", path, "--strict", "--json"]) == 2
    chat, ids = json.loads(capsys.readouterr().out)["files"]
    assert (chat["report"]["rows"], chat["report"]["documents"], chat["report"]["broken"]) == (61, 60, 1)
    assert sum(chat["lengths"].values()) == 60
    assert ids["report"]["tokens"] == 3000
    assert main(["data", "show", path, "--window", "3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert sum(len(part["ids"]) for part in shown["segments"] if part["trained"]) == shown["labels"]
    assert main(["data", "pack", path, "--out", str(tmp_path / "packed"), "--json"]) == 0
    (made,) = json.loads(capsys.readouterr().out)
    assert made["report"]["documents"] == 60
    assert main(["data", "pack", path, "--out", str(tmp_path / "other"), "--strict"]) == 2
    packed = make_run(
        tmp_path / "b", context=64, model={"config": MODEL["config"]}, data={"train": [made["shard"]]}
    )
    assert train(packed, live=False).steps == 6


def test_files_are_looked_at_without_a_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "Once upon a time there was a bird.", "title": "x"}\n')
    assert main(["data", "check", str(rows), "--context", "8"]) == 2
    assert "body, title" in capsys.readouterr().out.replace("\n", " ")
    words = ["--context", "64", "--set", "text_column=body", "--set", "packing=documents"]
    assert main(["data", "show", str(rows), *words]) == 0
    assert "nce upon a time" in capsys.readouterr().out
    bare = tmp_path / "a.bin"
    np.arange(100, dtype=np.uint16).tofile(bare)
    assert main(["data", "check", str(bare), "--set", "ids=uint16"]) == 0
    np.full(100, 5000, np.uint16).tofile(bare)
    assert main(["data", "check", str(bare), "--set", "ids=uint16"]) == 2
    assert "5000 at place 0" in capsys.readouterr().out.replace("\n", " ")
