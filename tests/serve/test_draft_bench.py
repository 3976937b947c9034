"""`torchwright bench --draft`: the same requests with a draft and without."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from torchwright.cli import main
from torchwright.serve.engine.draft_bench import cut
from torchwright.workloads.texts import BUNDLED

SIZES = ["--prompt-tokens", "8", "--new-tokens", "12", "--batch", "2"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same one as its draft."""
    ignored = shutil.ignore_patterns("speech", "*.txt")
    return BUNDLED, Path(shutil.copytree(BUNDLED, tmp_path_factory.mktemp("draft") / "twin", ignore=ignored))


def test_a_draft_that_is_right_is_accepted(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, twin = map(str, folders)
    text = tmp_path / "text.txt"
    text.write_text("a text of its own, and not the bundled one " * 20)
    words = ["bench", model, "--draft", twin, "--eval-text", str(text), "--dtype", "bf16", *SIZES]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["draft"], found["batch"], found["rounds"]) == ("draft model", 2, 7)
    rows = {(row["temperature"], row["proposed_by"]): row for row in found["proposals"]}
    names = ("no proposals", "n-gram", "draft model", "draft model and n-gram")
    assert sorted(rows) == sorted((temperature, name) for temperature in (0.0, 0.8) for name in names)
    for (_, name), row in rows.items():
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert row["accepted_tokens"] <= row["proposed_tokens"]
        assert name != "no proposals" or row["proposed_tokens"] == 0
    greedy = rows[0.0, "draft model"]
    assert greedy["accepted_tokens"] == greedy["proposed_tokens"]


@pytest.mark.slow  # the rows as above, measured again
def test_the_table_names_who_proposed(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    model, twin = map(str, folders)
    assert main(["bench", model, "--draft", twin, "--dtype", "bf16", *SIZES]) == 0
    assert "draft model and n-gram" in capsys.readouterr().out


def test_prompts_are_whole_and_from_all_over() -> None:
    prompts = cut(list(range(1000)), 64)
    assert all(len(ids) == 64 and ids == list(range(ids[0], ids[0] + 64)) for ids in prompts)
    assert {0, 896} <= {ids[0] for ids in prompts}
    assert cut(list(range(64)), 64) == [list(range(64))]
    assert cut(list(range(63)), 64) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--eval-text", __file__], "--eval-text is for --draft"),
        (["--draft", "mtp", "--device", "cuda"], "on the CPU alone"),
        (["--draft", "mtp"], "MTP layers of LlamaForCausalLM are not known"),
        (["--draft", "{model}"], "is the model itself"),
        (["--draft", "{twin}", "--prompt-tokens", "100000"], "exceed the model's context"),
        (["--draft", "{twin}", "--new-tokens", "100000"], "exceed the model's context"),
    ],
)
def test_refusals(
    words: list[str], message: str, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, twin = map(str, folders)
    given = [word.format(model=model, twin=twin) for word in words]
    assert main(["bench", model, *given]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
