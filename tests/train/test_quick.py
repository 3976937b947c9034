"""A run from a model and its data, without a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from runs import BUNDLED, make_run

from torchwright.cli import main
from torchwright.train.run.config import Lora
from torchwright.train.run.data_section import RunError
from torchwright.train.run.loop import train
from torchwright.train.run.quick import quick_run, read_fields, to_toml
from torchwright.train.run.read import check_run, parse_run, read_run

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
    assert run.tokens == told["tokens"] == pytest.approx(3 * 3000, rel=0.05)
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


@pytest.mark.parametrize("world", [1, 4])
def test_sizes_follow_from_the_data(tmp_path: Path, world: int) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    shutil.copy(BUNDLED / "calibration.txt", texts / "small.txt")
    small = parse_run(quick_run(str(BUNDLED), [str(texts)], world=world))
    check_run(small)
    for number in range(40):
        shutil.copy(BUNDLED / "eval.txt", texts / f"{number}.txt")
    large = parse_run(quick_run(str(BUNDLED), [str(texts)], world=world, lora=""))
    check_run(large)
    assert small.context < large.context == 1024
    assert small.batch_tokens < large.batch_tokens
    assert large.batch_tokens % (world * large.context) == 0
    assert small.optimizer.lr < large.optimizer.lr
    # The same three times, within what the first megabyte says of the rest.
    count = len(json.loads((BUNDLED / "tokenizer.json").read_text())["model"]["vocab"])
    assert count < small.tokens < large.tokens < 3 * 40 * 200_057


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
    values = quick_run(
        str(BUNDLED), [str(BUNDLED / "eval.txt")], lora="dora=true,base=nf4,alpha=8", merge=True
    )
    (tmp_path / "run.toml").write_text(to_toml(values))
    assert read_run(tmp_path / "run.toml") == parse_run(values)
