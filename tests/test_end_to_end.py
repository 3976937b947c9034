"""The command line on the bundled model, in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from torchwright.workloads.language import BUNDLED

pytestmark = pytest.mark.slow
NEVER = ("compile", "regional", "attention", "matmul_attention", "threads", "allocator", "max_autotune")
SMALL = ("--prompt-tokens", "16", "--new-tokens", "4")


PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and so their children, ignore it
from torchwright.cli import main
sys.exit(main())
"""


def command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", PROGRAM, *arguments]


def torchwright(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(arguments), capture_output=True, text=True, timeout=200, cwd=cwd)


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """The bundled model with nothing tried but what needs no compiler."""
    out = tmp_path_factory.mktemp("out") / "artifact"
    text = tmp_path_factory.mktemp("text") / "eval.txt"
    text.write_text((BUNDLED / "eval.txt").read_text()[:3000])  # the whole takes a minute of metrics
    arguments = ["optimize", *SMALL, "--eval-text", str(text), "--time-budget", "30", "--json", "--quiet"]
    arguments += [word for name in NEVER for word in ("--without", name)]
    done = torchwright(*arguments, "-o", str(out))
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


def test_optimize_writes_an_artifact_and_prints_the_recipe(optimized: tuple[Path, dict]):
    out, printed = optimized
    assert printed["path"] == str(out)
    recipe = printed["recipe"]
    assert recipe == json.loads((out / "recipe.json").read_text())
    assert recipe["speedup"]["value"] >= 1.0
    assert recipe["search_seconds"] <= 1.1 * 30
    assert not set(NEVER) & {rung["step"]["name"] for rung in recipe["rungs"]}
    assert sorted(path.name for path in out.parent.iterdir()) == ["artifact"]


def test_bench_and_report_read_it(optimized: tuple[Path, dict]):
    out, _ = optimized
    done = torchwright("bench", str(out), "--json")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["ttft_s"] > 0
    assert measured["decode_tokens_per_s"] > 0
    shown = torchwright("report", str(out))
    assert (shown.returncode, shown.stdout.strip()) == (0, str(out / "report.html"))
    assert "<svg" in (out / "report.html").read_text()


def test_verify_runs_and_has_a_verdict(optimized: tuple[Path, dict]):
    """On a busy machine the speed may really have changed, or not be known, and all of what was measured is said."""
    out, _ = optimized
    done = torchwright("verify", str(out), "--json")
    printed = json.loads(done.stdout)
    assert {"holds": 0, "broken": 1, "inconclusive": 3}[printed["verdict"]] == done.returncode, done.stderr
    assert printed["turns"] >= 9
    assert "timing both in turn" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["optimize", "./no/such/folder"], "no/such/folder"),
        (["optimize", "--with", "dtyp"], "did you mean 'dtype'"),
        (["verify", "./no/such/folder"], "there is no artifact at"),
        (["optimize", "--resume", "-o", "./no/such/folder"], "there is no search to continue in"),
    ],
)
def test_what_cannot_be_is_one_paragraph_and_exit_code_2(arguments: list[str], words: str):
    done = torchwright(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_a_signal_in_the_middle_leaves_nothing_half_written(
    tmp_path: Path, number: int, code: int, word: str
):
    process = subprocess.Popen(
        command(["optimize", *SMALL, "--quiet", "-o", str(tmp_path / "out")]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out*/.trials/*")) and time.monotonic() < deadline:
        time.sleep(0.05)  # until the first trial has begun
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in errors) == (code, False), errors
    assert word in errors
    assert list(tmp_path.iterdir()) == []


FACTORY = """
import torch

def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
    return model, torch.randn(64, 512)
"""


def test_a_search_of_a_users_module_goes_on_where_it_ended(tmp_path: Path):
    (tmp_path / "mine.py").write_text(FACTORY)
    never = (
        "compile",
        "allocator",
        "fast_math",
        "dense_attention",
        "matmul_attention",
        "openvino",
        "onnxruntime",
    )
    words = ["optimize", "mine:make", "--max-drop", "0.05", "--time-budget", "60", "--json", "-o", "out"]
    words += [word for name in never for word in ("--without", name)]
    first = torchwright(*words, "--without", "threads", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    found = json.loads(first.stdout)["recipe"]["rungs"]
    measured = [rung for rung in found if rung["speedup"]]
    assert {rung["step"]["name"] for rung in measured} == {"dtype"}
    again = torchwright(*words, "--resume", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "continues the search that ended at" in again.stderr
    recipe = json.loads(again.stdout)["recipe"]
    assert all(rung | {"earlier": True} in recipe["rungs"] for rung in measured)
    assert [rung["earlier"] for rung in recipe["rungs"] if rung["step"]["name"] == "threads"] == [False]
    trials = [line for line in again.stderr.splitlines() if "] trying" in line]
    assert not [line for line in trials if "dtype" in line and "recipe of the earlier search" not in line]
    assert recipe["command"].endswith("--resume")
    (tmp_path / "mine.py").write_text(FACTORY.replace("2048", "1024"))
    other = torchwright(*words, "--resume", cwd=tmp_path)
    assert (other.returncode, "has other layers" in other.stderr) == (2, True)
    assert json.loads((tmp_path / "out" / "recipe.json").read_text()) == recipe
