"""A whole run in one process: it learns, resumes bit for bit, and what it writes is a model that answers."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import BUNDLED, CONFIG, assert_same, checkpoints, losses, make_run, state

import torchwright as tw
from torchwright.core.errors import TorchwrightError
from torchwright.train.data.shards import DataError
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.read import read_run
from torchwright.train.run.loop.train import train
from torchwright.train.run.observe.metrics import read_figures
from torchwright.train.run.runtime.checkpoint import FOLDER, CheckpointError, whole
from torchwright.train.run.runtime.folder import hold
from torchwright.train.run.runtime.source import write_source

MUON = {"name": "muon", "lr": 3e-3, "adam_lr": 1e-3}


@pytest.mark.quick
def test_a_run_learns_and_its_model_answers(tmp_path: Path) -> None:
    text = BUNDLED / "calibration.txt"
    run = make_run(
        tmp_path,
        tokens=16 * 512,
        batch_tokens=512,
        precision="bf16",
        model={"config": {**CONFIG, "vocab_size": 4096}, "tokenizer": str(BUNDLED)},
        data={"train": [str(text)], "validation": [str(BUNDLED / "eval.txt")], "begin_every": 2},
        evaluation={"every_steps": 8, "tokens": 1024, "prompts": ["The module"], "sample_tokens": 4},
    )
    outcome = train(run, live=False)
    figures = read_figures(tmp_path / "out")
    assert outcome.steps == 16
    assert figures[16]["loss"] < figures[1]["loss"] - 0.8
    assert outcome.validation_loss == figures[16]["validation_loss"] < figures[8]["validation_loss"]
    assert 0 < figures[16]["effective_time"] < 1
    events = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert sum(event.get("event") == "end" for event in events) == 1
    samples = [event["text"] for event in events if event.get("event") == "sample"]
    assert len(samples) == 2
    assert all(sample.startswith("The module") for sample in samples)

    model = tw.load_decoder(outcome.model)
    (answer,) = model.generate(["The module"], max_new_tokens=4)
    assert samples[-1] == f"The module{answer}" or samples[-1] == answer


@pytest.mark.plain("adafactor")
@pytest.mark.parametrize(
    "optimizer",
    [
        MUON,
        *({"name": name} for name in ("adamw", "adamw8bit", "adafactor")),
        pytest.param({"name": "adamw4bit"}, marks=pytest.mark.slow),  # torchao compiles it for a minute
    ],
    ids=lambda chosen: chosen["name"],
)
def test_resuming_equals_not_stopping(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    """Parameters, optimizer state and losses, bit for bit."""
    run = make_run(
        tmp_path / "whole", optimizer={"lr": 3e-3, **optimizer}, checkpoint={"every_steps": 2, "keep": 9}
    )
    train(run, live=False)
    assert [path.name for path in checkpoints(run)] == ["step-00000002", "step-00000004", "step-00000006"]
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    again = tmp_path / "again" / "run.toml"
    for later in checkpoints(again)[1:]:
        shutil.rmtree(later)
    (tmp_path / "again" / "out" / "metrics.jsonl").unlink()
    outcome = train(again, resume=True, live=False)
    assert outcome.steps == 6
    assert_same(state(checkpoints(again)[-1]), state(checkpoints(run)[-1]))
    assert losses(again) == {step: loss for step, loss in losses(run).items() if step > 2}


def test_windows_of_another_length_in_the_decay(tmp_path: Path) -> None:
    """And continuing a finished run for more tokens."""
    schedule = {"name": "wsd", "decay_fraction": 0.5, "decay_context": 64, "warmup_tokens": 300}
    run = make_run(tmp_path, schedule=schedule, tokens=4 * 256)
    assert train(run, live=False).steps == 4
    rates = [line["lr"] / 3e-3 for line in read_figures(tmp_path / "out").values()]
    assert rates == pytest.approx([256 / 300, 1.0, 0.5, 0.0])
    run.write_text(run.read_text().replace("tokens = 1024", "tokens = 2048"))
    outcome = train(run, resume=True, live=False)
    assert outcome.steps == 8
    assert outcome.model
    assert len(losses(run)) == 8


def test_continuing_from_a_folder_starts_with_its_weights(tmp_path: Path) -> None:
    first = train(make_run(tmp_path / "one"), live=False)
    second = make_run(
        tmp_path / "two", model={"folder": str(first.model)}, optimizer={"lr": 1e-9, "weight_decay": 0.0}
    )
    outcome = train(second, live=False)
    ids = torch.arange(40)[None] % 128
    one, two = (tw.load_decoder(folder).logits(ids) for folder in (first.model, outcome.model))
    torch.testing.assert_close(one, two, atol=1e-4, rtol=0)


def test_a_run_begun_anew_moves_the_one_before_aside(tmp_path: Path) -> None:
    run = make_run(tmp_path, tokens=512)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        train(run, resume=True, live=False)
    for aside in (1, 2):
        outcome = train(run, live=False)
        before = state(checkpoints(run)[-1])
        assert train(run, live=False).loss is None, "it was at its end, and goes no further"
        assert outcome.steps == train(run, fresh=True, live=False).steps == 2
        assert_same(state(whole(tmp_path / f"out.{aside}" / FOLDER)[-1]), before)
        assert_same(state(checkpoints(run)[-1]), before)
    shutil.rmtree(tmp_path / "out" / FOLDER)
    with pytest.raises(CheckpointError, match="a trained model and no checkpoint"):
        train(run, live=False)


def test_what_torchrun_starts_again_is_not_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, tokens=512)
    train(run, live=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(run, fresh=True, live=False).loss is None
    assert not (tmp_path / "out.1").exists()


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, tokens=512)
    (tmp_path / "out").mkdir()
    with contextlib.ExitStack() as held:
        hold(tmp_path / "out", held)
        for fresh in (False, True):
            with pytest.raises(RunError, match="another run is at work in"):
                train(run, fresh=fresh, live=False)
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["lock"]
    assert train(run, live=False).model


def test_a_run_folder_begun_with_another_model_is_not_taken_as_it_is(tmp_path: Path) -> None:
    """As a kill before the first checkpoint leaves it: source and tokens are there, nothing else."""
    words = tmp_path / "words"
    shutil.copytree(BUNDLED, words)

    def file(folder: str, **config: Any) -> Path:
        model = {"config": {**CONFIG, "vocab_size": 4096, **config}, "tokenizer": str(words)}
        return make_run(tmp_path / folder, model=model, tokens=512)

    for folder in ("model", "tokenizer"):
        run = file(folder)
        write_source(read_run(run), run.parent, run.parent / "out")
    with pytest.raises(RunError, match=r"model\.hidden_size: 64 → 32; model\.num_hidden_layers: 2 → 1"):
        train(file("model", hidden_size=32, num_hidden_layers=1), live=False)
    with (words / "tokenizer.json").open("a") as tokenizer:
        tokenizer.write(" ")
    with pytest.raises(RunError, match=r"begun with another model.*Found: tokenizer\.json of the tokenizer"):
        train(file("tokenizer"), live=False)


def test_a_model_that_cannot_be_read_is_named_as_the_user_has_it(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": "wide"}))
    in_file = {"config": {**CONFIG, "architectures": ["Unknown"]}}
    for model, named in (
        (in_file, "`model.config` of the run file"),
        ({"folder": "folder"}, "folder/config.json"),
    ):
        with pytest.raises(TorchwrightError, match=named) as caught:
            train(make_run(tmp_path, model=model), live=False)
        assert ".source." not in str(caught.value)


def test_a_checkpoint_of_the_order_before_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, tokens=512)
    train(run, live=False)
    described = checkpoints(run)[-1] / "checkpoint.json"
    data = json.loads(described.read_text())
    del data["facts"]["order"], data["facts"]["train_files"]
    described.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="read the training data in another order"):
        train(run, resume=True, live=False)


def test_less_data_than_a_window_is_refused_before_the_first_step(tmp_path: Path) -> None:
    schedule = {"name": "wsd", "decay_context": 128}
    run = make_run(tmp_path, schedule=schedule, batch_tokens=512, tokens=2048, data={"train": ["held.npy"]})
    np.save(tmp_path / "held.npy", np.arange(100, dtype=np.uint16))
    with pytest.raises(DataError, match=r"less than one window of 128 tokens.*Found: 100 tokens in 1 files"):
        train(run, live=False)


def test_windows_are_not_led_by_a_token_that_the_model_does_not_have(tmp_path: Path) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "bos_token_id"}
    run = make_run(tmp_path, model={"config": config}, data={"train": ["a.npy"], "begin_every": 2})
    with pytest.raises(RunError, match="begin token"):
        train(run, live=False)


def test_another_run_file_does_not_resume(tmp_path: Path) -> None:
    run = make_run(tmp_path, tokens=512)
    train(run, live=False)
    text = run.read_text()
    run.write_text(text.replace("lr = 0.003", "lr = 0.004").replace("tokens = 512", "tokens = 1024"))
    with pytest.raises(CheckpointError, match=r"optimizer\.lr: 0\.003 → 0\.004"):
        train(run, resume=True, live=False)
    run.write_text(text.replace("tokens = 512", "tokens = 256"))
    with pytest.raises(CheckpointError, match="512 tokens; the run file has 256"):
        train(run, resume=True, live=False)


def test_prompts_need_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"evaluation\.prompts needs a tokenizer"):
        train(make_run(tmp_path, evaluation={"prompts": ["x"]}), live=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # of Inductor's own imports
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # of Dynamo, at a layer's input
@pytest.mark.parametrize("how", ["none", "selective"])
def test_compiled_blocks_learn_the_same(tmp_path: Path, how: str) -> None:
    """Losses within 1e-4: float32 sums in another order; evaluation runs through the compiled layers as well."""
    common: dict[str, Any] = {
        "tokens": 4 * 256,
        "data": {"train": ["a.npy"], "validation": ["held.npy"]},
        "recompute": how,
        "checkpoint": {},
    }
    eager, compiled = (
        make_run(tmp_path / "eager", **common),
        make_run(tmp_path / "compiled", compile=True, **common),
    )
    one, other = train(eager, live=False), train(compiled, live=False)
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-4)
    assert other.validation_loss == pytest.approx(one.validation_loss, rel=1e-4)
