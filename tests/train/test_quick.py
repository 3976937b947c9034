"""A run from a model and its data, without a file."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import BUNDLED, make_run

from torchwright.cli import main
from torchwright.train.data.shards import DataError
from torchwright.train.model.foreign import read_model_config
from torchwright.train.run import quick
from torchwright.train.run import words as from_words_room
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.read import check_run, parse_run, read_run
from torchwright.train.run.config.run import Lora
from torchwright.train.run.loop.train import train
from torchwright.train.run.quick import QuickRun, quick_run, read_fields
from torchwright.train.run.runtime.corpus import epochs, make_shards, open_shards, wait_until_visible, walk_of
from torchwright.train.run.runtime.processes import ProcessRank

WORDS = ["--lora", "r=2,targets=q_proj+v_proj", "--quiet", "--json"]


@pytest.mark.slow
def test_words_make_a_run_that_goes_on_and_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_run(tmp_path, tokens=256)
    model = train(base, live=False).model
    out = tmp_path / "tuned"
    words = ["train", "--model", str(model), "--data", str(tmp_path / "a.npy"), "-o", str(out), *WORDS]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["adapter"] == str(out / "adapter")
    assert told["model"] is None
    run = read_run(out / "run.toml")
    assert run.tokens == told["tokens"] == pytest.approx(3 * 0.95 * 3000, rel=0.02)  # a part is held out
    assert run.lora
    assert (run.lora.r, run.lora.targets) == (2, ["q_proj", "v_proj"])
    # The words again, or the file that they made: it is at its end, and can still be merged.
    assert main(words) == 0
    assert main(["train", str(out / "run.toml"), "--merge", "--quiet", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.split("}\n")[-2] + "}")
    assert (told["loss"], told["model"]) == (None, str(out / "model"))
    # Other words are another run.
    words[-3] = "r=3"
    assert main(words) == 2
    assert "lora.r: 2 → 3" in capsys.readouterr().err
    assert main([*words, "--fresh"]) == 0
    assert read_run(tmp_path / "tuned.1" / "run.toml").lora == run.lora

    again = read_run(out / "run.toml")
    assert again.lora
    assert again.lora.r == 3


@pytest.mark.parametrize(("supported", "chosen"), [(True, None), (False, "fp32")])
def test_precision_is_what_the_processor_computes_in(
    monkeypatch: pytest.MonkeyPatch, supported: bool, chosen: str | None
) -> None:
    monkeypatch.setattr("torchwright.hardware.devices.default_name", lambda: "cpu")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    data = [str(BUNDLED / "eval.txt")]
    made = quick_run(str(BUNDLED), data)
    assert made.values.get("precision") == chosen
    assert ("precision" in made.reasons) == (chosen is not None)
    asked = quick_run(str(BUNDLED), data, settings={"precision": "bf16", "tokens": 4096})
    assert asked.values["precision"] == "bf16"
    assert not {"precision", "tokens"} & asked.reasons.keys(), "reasons of what was asked for in their place"
    assert "context" in asked.reasons


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_sizes_follow_from_the_data(tmp_path: Path, world: int) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    shutil.copy(BUNDLED / "calibration.txt", texts / "small.txt")
    small = parse_run(quick_run(str(BUNDLED), [str(texts)], world=world).values)
    check_run(small)
    for number in range(12):
        shutil.copy(BUNDLED / "eval.txt", texts / f"{number}.txt")
    large = parse_run(quick_run(str(BUNDLED), [str(texts)], world=world, lora="").values)
    check_run(large)
    assert small.context < large.context == 1024
    assert small.batch_tokens < large.batch_tokens
    assert large.batch_tokens % (world * large.context) == 0
    assert small.optimizer.lr < large.optimizer.lr
    count = len(json.loads((BUNDLED / "tokenizer.json").read_text())["model"]["vocab"])
    assert count < small.tokens < large.tokens < 3 * 12 * 200_057


def test_words_that_say_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"--lora takes name=value, not 'r16'.*Allowed: r, alpha"):
        read_fields("--lora", "r16", Lora)
    with pytest.raises(RunError, match="--merge puts adapters into a model"):
        quick_run(str(BUNDLED), [str(BUNDLED / "eval.txt")], merge=True)
    with pytest.raises(RunError, match="there is no file"):
        quick_run(str(BUNDLED), [str(tmp_path / "none.txt")])
    for words in (
        ["--data", "x"],
        ["run.toml", "--lora"],
        ["--model", str(BUNDLED)],
        ["run.toml", "--model", "x"],
    ):
        assert main(["train", *words]) == 2


def test_values_are_toml(tmp_path: Path) -> None:
    made = quick_run(str(BUNDLED), [str(BUNDLED / "eval.txt")], lora="dora=true,base=nf4,alpha=8", merge=True)
    (tmp_path / "run.toml").write_text(made.written())
    assert read_run(tmp_path / "run.toml") == parse_run(made.values)
    for name in ("tokens", "context", "optimizer.lr", "data.hold_out"):
        assert made.reasons[name] in made.written()


def chats(path: Path, count: int, *, words: int = 12) -> Path:
    """Rows of a short conversation beside columns that nobody reads."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Say {number}."},
                {"role": "assistant", "content": " ".join(["word"] * (1 + number % words))},
            ],
            "id": number,
            "embedding": [number / 7] * 40,
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def epochs_of(made: QuickRun, folder: Path) -> float:
    """Count how often a run reads its data, by the windows that it packs."""
    run = parse_run(made.values)
    config = read_model_config(BUNDLED)
    corpus = open_shards(run, config, make_shards(run, config, folder, BUNDLED, folder / "tokens"))
    walk = walk_of(run, corpus, run.context, None, 0)
    return epochs(walk, run.tokens // run.context) or 0.0


def test_rows_are_read_three_times_whatever_else_they_hold(tmp_path: Path) -> None:
    """Tokens are counted, not guessed from bytes: of other columns, or of a compressed table."""
    pyarrow = pytest.importorskip("pyarrow", reason="an extra: torchwright[data]")
    parquet = pytest.importorskip("pyarrow.parquet", reason="an extra: torchwright[data]")
    lines = chats(tmp_path / "a.jsonl", 200)
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", compression="zstd")
    by_lines, by_table = (
        quick_run(str(BUNDLED), [str(tmp_path / name)]) for name in ("a.jsonl", "a.parquet")
    )
    assert by_lines.values["tokens"] == by_table.values["tokens"]
    assert epochs_of(by_lines, tmp_path) == pytest.approx(3, rel=0.1)
    once = quick_run(str(BUNDLED), [str(lines)], epochs=1)
    assert epochs_of(once, tmp_path) == pytest.approx(1, rel=0.1)


def test_windows_hold_the_longest_document_and_steps_several(tmp_path: Path) -> None:
    run = parse_run(quick_run(str(BUNDLED), [str(chats(tmp_path / "a.jsonl", 200, words=60))]).values)
    assert run.context == 256
    assert run.batch_tokens // run.context >= 2, "a window holds fewer than eight of them"
    long = parse_run(quick_run(str(BUNDLED), [str(chats(tmp_path / "b.jsonl", 320, words=400))]).values)
    assert long.context == 512


def test_settings_win_and_are_what_the_rest_follows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "Once upon a time there was a bird.", "title": "x"}\n' * 50)
    with pytest.raises(DataError, match=r"body, title.*text_column"):
        quick_run(str(BUNDLED), [str(path)])
    asked = {"data.text_column": "body", "optimizer.lr": 1e-3, "context": 64}
    run = parse_run(quick_run(str(BUNDLED), [str(path)], settings=asked).values)
    assert (run.data.text_column, run.optimizer.lr, run.context) == ("body", 1e-3, 64)
    assert run.batch_tokens % 64 == 0


def test_brackets_in_names_of_files_and_folders_are_letters(tmp_path: Path) -> None:
    folder = tmp_path / "data [2]"
    folder.mkdir()
    path = chats(folder / "part [1].jsonl", 40)
    one, all_of = (quick_run(str(BUNDLED), [str(found)]).values for found in (path, folder))
    assert one["tokens"] == all_of["tokens"]


def test_a_part_is_held_out_unless_it_is_not_wanted(tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", 200)
    made = quick_run(str(BUNDLED), [str(path)])
    assert made.values["data"]["hold_out"] == 0.05
    assert made.values["evaluation"]["every_steps"] == made.values["checkpoint"]["every_steps"]
    assert "hold_out" not in quick_run(str(BUNDLED), [str(path)], no_validation=True).values["data"]
    few = quick_run(str(BUNDLED), [str(chats(tmp_path / "few.jsonl", 10))])
    assert "hold_out" not in few.values["data"]
    assert "too few" in few.written()
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": "Once upon a time. " * 800}) + "\n" for _ in range(5)))
    long = quick_run(str(BUNDLED), [str(texts)])
    assert long.values["data"]["hold_out"] == 0.05
    assert "tokens are held out" in long.reasons["data.hold_out"]


def test_a_refused_run_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "x"}\n')
    words = ["train", "--model", str(BUNDLED), "--data", str(rows), "-o", str(tmp_path / "out"), "--quiet"]
    assert main(words) == 2
    assert "body" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_the_plan_says_why(tmp_path: Path) -> None:
    made = quick_run(str(BUNDLED), [str(chats(tmp_path / "a.jsonl", 200))], epochs=1)
    assert "read once, as asked for" in made.reasons["tokens"]
    assert "documents: the most with 10 steps an epoch" in made.reasons["batch_tokens"]
    assert "memory has room for about" in made.reasons["micro_batches"]
    few = quick_run(str(BUNDLED), [str(chats(tmp_path / "few.jsonl", 30))])
    assert "documents: the least" in few.reasons["batch_tokens"]
    for name in ("batch_tokens", "context", "tokens", "micro_batches", "optimizer.lr"):
        assert f"# {made.reasons[name]}" in made.written()


def test_processes_of_one_machine_share_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"vocab_size": 100_000, "hidden_size": 4096, "num_hidden_layers": 32}
    device: Any = SimpleNamespace(name="cpu", free_memory_bytes=lambda: 1 << 36)
    alone = quick._windows_in_memory(config, 64, device)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert quick._windows_in_memory(config, 64, device) == pytest.approx(alone / 4, abs=1)


def test_the_first_process_alone_tokenizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun each process once tokenized all the data, and removed the shards of the others."""
    path = chats(tmp_path / "a.jsonl", 40)
    made = quick_run(str(BUNDLED), [str(path)])
    shards = tmp_path / ".out.tokens" / "of-process-0"
    shards.mkdir(parents=True)
    calls: list[Any] = []
    second = contextlib.nullcontext(ProcessRank(rank=1, world=2, device="cpu"))
    monkeypatch.setattr(from_words_room, "processes", lambda _: second)
    monkeypatch.setattr(from_words_room, "patient", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(from_words_room, "on_first", lambda work: calls.append(work) or made)
    monkeypatch.setattr(from_words_room, "quick_run", pytest.fail)
    with from_words_room.from_words(str(BUNDLED), [str(path)], world=2, out=tmp_path / "out") as (text, _):
        assert text == made.written()
    assert len(calls) == 1
    assert shards.is_dir()


def test_a_process_waits_for_shards_that_another_wrote(tmp_path: Path) -> None:
    shard = tmp_path / "a.npy"
    shard.write_bytes(b"123")
    wait_until_visible({shard: 3}, 0)
    with pytest.raises(
        DataError, match=r"process 1 cannot see it.*1 of 2 files.*file system that all machines"
    ):
        wait_until_visible({shard: 3, tmp_path / "b.npy": 4}, 0, rank=1)
    writer = threading.Timer(0.05, shard.write_bytes, [b"12345"])
    writer.start()
    wait_until_visible({shard: 5}, 60)
    assert shard.read_bytes() == b"12345"
    writer.join()


@pytest.mark.slow
def test_two_processes_train_from_words(tmp_path: Path) -> None:
    data, out = chats(tmp_path / "a.jsonl", 60), tmp_path / "out"
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    words = ["--model", str(BUNDLED), "--data", str(data), "--set", "tokens=2048", "-o", str(out), "--quiet"]
    done = subprocess.run(
        [sys.executable, *several, sys.executable, "-m", "torchwright", "train", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert f"next: torchwright serve {out}" in done.stdout
    assert "2 processes" in (out / "report.html").read_text()
    assert read_run(out / "run.toml").parallel.dp_shard == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]
    assert len(list((out / "tokens").glob("*.safetensors"))) == 1
