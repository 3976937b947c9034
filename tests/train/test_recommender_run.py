"""A recommender's whole run: it learns what the hidden model says, resumes bit for bit, and on several processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from recommender_runs import make_recommender
from runs import assert_same, checkpoints, losses, run_processes, state
from safetensors.torch import load_file

from torchwright.train.recommender.trainer import train_recommender
from torchwright.train.run.runtime.checkpoint import CheckpointError


@pytest.mark.plain("dlrm")
@pytest.mark.parametrize("towers", [False, True], ids=["dlrm", "two towers"])
def test_resuming_equals_not_stopping(tmp_path: Path, towers: bool) -> None:
    """Dense layers, tables, both optimizers' state and losses, bit for bit, over the end of the files."""
    run = make_recommender(tmp_path / "whole", towers=towers)
    outcome = train_recommender(run, live=False)
    assert outcome.steps == 6
    assert outcome.quality is not None
    again = copy_until(run, 2, tmp_path / "again")
    (again.parent / "out" / "metrics.jsonl").unlink()
    train_recommender(again, resume=True, live=False)
    assert_same(state(checkpoints(again)[-1]), state(checkpoints(run)[-1]))
    assert losses(again) == {step: loss for step, loss in losses(run).items() if step > 2}
    held = sorted(path.name for path in (run.parent / "out" / "model" / "tables").iterdir())
    assert len(held) == (4 if towers else 26)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four processes, two copies of the tables that meet every four steps, and fewer held-out rows than processes."""
    run = make_recommender(
        tmp_path_factory.mktemp("four"),
        embeddings={"groups": 2, "sync_every": 4},
        evaluation={"samples": 3},
    )
    for code, told in run_processes(run, world=4):
        assert code == 0, told
    return run


@pytest.mark.slow
def test_copies_that_meet_rarely_resume_bit_for_bit(tmp_path: Path, four: Path) -> None:
    """From between two meetings, where the copies differ."""
    again = copy_until(four, 2, tmp_path / "again")
    for code, told in run_processes(again, world=4, resume=True):
        assert code == 0, told
    whole, resumed = (
        {
            f"{file.name} {name}": tensor
            for file in path.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        for path in (checkpoints(four)[-1], checkpoints(again)[-1])
    )
    assert_same(whole, resumed)
    copies = [whole[name] for name in whole if ".C3[" in name and name.endswith("weight")]
    assert len(copies) == 2
    assert not torch.equal(*copies), "6 is no multiple of 4: the copies have not met"
    again.write_text(again.read_text().replace("groups = 2", "groups = 1"))
    with pytest.raises(CheckpointError, match="processes: 4 → 1"):
        train_recommender(again, live=False)


@pytest.mark.slow
def test_the_report_has_drift_and_plan(four: Path) -> None:
    report = json.loads((four.parent / "out" / "report.json").read_text())
    assert report["steps"] == 6
    assert 0 < report["drift"]["loss_mean"] < 0.1
    assert 0 < report["drift"]["tables_mean"] <= report["drift"]["tables_largest"]
    planned, measured = report["plan"]["tables_bytes"].values()
    assert measured == pytest.approx(planned, rel=0.3)
    assert report["plan"]["sync_s"]["measured"] > 0


def test_another_file_or_table_is_another_run(tmp_path: Path) -> None:
    run = make_recommender(tmp_path, samples=128)
    train_recommender(run, live=False)
    text = run.read_text()
    run.write_text(text.replace("C3 = 400", "C3 = 401"))
    with pytest.raises(CheckpointError, match="C3: 400 → 401"):
        train_recommender(run, live=False)
    run.write_text(text.replace('"train.tsv.gz"', '"held.tsv"'))
    with pytest.raises(CheckpointError, match="train_files"):
        train_recommender(run, live=False)


def copy_until(run: Path, step: int, folder: Path) -> Path:
    """The run as it was when the checkpoint of `step` was its last."""
    shutil.copytree(run.parent, folder)
    copied = folder / "run.toml"
    for later in checkpoints(copied):
        if int(later.name[5:]) > step:
            shutil.rmtree(later)
    shutil.rmtree(folder / "out" / "model")
    return copied
