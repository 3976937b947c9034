"""The command: words in, exit codes and summaries out. What needs a model's answers starts one tiny encoder."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from folders import encoder, sentence_transformer
from torchwright.cli import main

ROWS = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder") / "folder"
    return sentence_transformer(path, encoder(), pooling={"pooling_mode_mean_tokens": True})


def texts(path: Path, count: int = ROWS) -> Path:
    path.write_text("".join(json.dumps({"id": n, "text": f"row {n}"}) + "\n" for n in range(count)))
    return path


def said(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_plan_needs_no_torch(folder: Path, tmp_path: Path) -> None:
    words = [
        "map",
        str(folder),
        str(texts(tmp_path / "a.jsonl")),
        "-o",
        str(tmp_path / "out"),
        "--dry-run",
        "--json",
    ]
    code = f"import sys; from torchwright.cli import main; main({words!r}); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["rows"], plan["missing_parts"], plan["task"]) == (ROWS, 1, "embed")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--shard", "4/4"], "I from 0 to N - 1"),
        (["--openai", "--task", "embed"], "does not go with"),
        (["--request", "{"], "it is not JSON"),
        (["--request", '{"seed": 1}', "--seed", "2"], "given by an option and in --request"),
        (["--task", "generate"], "which does not generate"),
        (["--text-column", "words"], "columns id, text"),
        (["--workers", "1000"], "1000 workers"),
        (["--dtype", "bf16"], "--dtype is for language and speech models"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_opened(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], wanted: str
) -> None:
    source = texts(tmp_path / "a.jsonl")
    assert main(["map", str(folder), str(source), "-o", str(tmp_path / "out"), *words]) == 2
    assert wanted in " ".join(capsys.readouterr().err.split())


def test_rows_in_answers_out(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = texts(tmp_path / "a.jsonl", 5), tmp_path / "out.jsonl"
    with source.open("a") as file:
        file.write('{"id": 5, "text": ""}\n')
    assert main(["map", str(folder), str(source), "-o", str(out), "--json"]) == 0
    found = said(capsys)
    assert (found["rows"], found["rejected"], found["joined"]) == (6, 1, True)
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [0, 1, 2, 3, 4]
    rejected = [json.loads(line) for line in (tmp_path / "out.rejected.jsonl").read_text().splitlines()]
    assert [(row["row"], row["reason"]) for row in rejected] == [(5, "the text is empty")]
    # The same again: nothing to do. Another task there: refused.
    assert main(["map", str(folder), str(source), "-o", str(out), "--json"]) == 0
    assert said(capsys)["computed_parts"] == 0
    assert main(["map", str(folder), str(source), "-o", str(out), "--truncate"]) == 2
    assert "options.truncate was false and is true" in capsys.readouterr().err


@pytest.mark.slow  # one more start of torch; `test_isolation` answers or rejects every row
def test_a_file_without_a_row_that_can_be_read_is_an_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "worse.jsonl").write_text("{\n" * 3)
    assert main(["map", str(folder), str(tmp_path / "worse.jsonl"), "-o", str(tmp_path / "w")]) == 2


@pytest.mark.slow  # five starts of torch
def test_kills_and_interrupts_lose_no_row(folder: Path, tmp_path: Path) -> None:
    source, draw = texts(tmp_path / "a.jsonl"), random.Random(0)
    words = [sys.executable, "-m", "torchwright", "map", str(folder), str(source), "--part-rows", "4", "-o"]
    subprocess.run([*words, str(tmp_path / "quiet.jsonl")], check=True)
    seen = dict[str, int]()
    out = tmp_path / "killed.jsonl"
    parts = out.with_name("killed.jsonl.parts")
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen([*words, str(out)], stderr=subprocess.PIPE, text=True)
        before = len(seen)
        while process.poll() is None and len(list(parts.glob("part-*.jsonl"))) < before + draw.randint(1, 5):
            time.sleep(0.01)
        process.send_signal(number)
        _, errors = process.communicate()
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert "the same command goes on from there" in errors
        now = {path.name: path.stat().st_mtime_ns for path in parts.glob("part-*.jsonl")}
        assert now.items() >= seen.items()
        seen = now
    assert 0 < len(seen) < ROWS // 4
    subprocess.run([*words, str(out)], check=True)
    assert out.read_bytes() == (tmp_path / "quiet.jsonl").read_bytes()


@pytest.mark.slow  # a process that starts torch
def test_standard_input_is_read_to_its_end(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = [sys.executable, "-m", "torchwright", "map", str(folder), "-", "-o", str(out)]
    subprocess.run(words, input=b"one\n\ntwo\r\n", check=True, env=os.environ)
    assert [json.loads(line)["row"] for line in out.read_text().splitlines()] == [0, 1]
