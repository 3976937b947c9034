"""Several processes: equal to one, killed and resumed bit for bit, cut anew for another layout, refused when unlike.

Processes meet as under torchrun, by environment variables (`runs.run_processes`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import (
    CONFIG,
    MIXTURE,
    assert_same,
    checkpoints,
    ids_read,
    losses,
    make_run,
    run_processes,
    to_toml,
)
from safetensors.torch import load_file

from torchwright.cli import main
from torchwright.train.run.loop.train import train

HSDP_CP = {"dp_replicate": 2, "cp": 2}
KEEP = {"every_steps": 2, "keep": 9}


def parts(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every process's part of every tensor."""
    return {
        f"{path.name} {name}": tensor
        for path in checkpoint.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of HSDP and context parallelism on four processes."""
    run = make_run(tmp_path_factory.mktemp("four"), layout=HSDP_CP, checkpoint=KEEP)
    for code, told in run_processes(run, world=4):
        assert code == 0, told
    return run


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


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run.parent / "out" / "model" / "model.safetensors")


def assert_near(one: Path, other: Path, first: int = 1, *, atol: float = 3e-5) -> None:
    """Losses and trained weights of two layouts: float32 in another order, 1e-5."""
    left, right = losses(one), losses(other)
    assert [left[step] for step in range(first, 7)] == pytest.approx(
        [right[step] for step in range(first, 7)], rel=1e-5
    )
    ours, theirs = weights(one), weights(other)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=atol, rtol=0, msg=name)


def test_hsdp_and_context_parallel_equal_one_process(tmp_path: Path, four: Path) -> None:
    alone = make_run(tmp_path)
    train(alone, live=False)
    assert_near(alone, four)
    assert len(list(checkpoints(four)[-1].glob("*.safetensors"))) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "config"),
    [
        pytest.param({"dp_shard": 2, "tp": 2}, CONFIG, id="fsdp and tensor parallel"),
        pytest.param({"dp_shard": 2, "ep": 2}, CONFIG | MIXTURE, id="expert parallel"),
    ],
)
def test_other_layouts_train_to_the_same_model_and_resume_bit_for_bit(
    tmp_path: Path, layout: dict[str, int], config: dict[str, Any]
) -> None:
    world = layout["dp_shard"] * layout.get("tp", 1)
    alone = make_run(tmp_path / "alone", model={"config": config})
    train(alone, live=False)
    run = make_run(tmp_path / "run", model={"config": config}, layout=layout, checkpoint=KEEP)
    for code, told in run_processes(run, world=world):
        assert code == 0, told
    # AdamW makes a step of 3e-3 of a gradient however small it is, so that the rounding of one that is nearly nothing
    # is seen in the weight: one of the mixture's, by a hundredth of a step.
    assert_near(alone, run, atol=1e-4 if "ep" in layout else 3e-5)
    resumed = copy_until(run, 4, tmp_path / "resumed")
    for code, told in run_processes(resumed, world=world, resume=True):
        assert code == 0, told
    assert_same(parts(checkpoints(resumed)[-1]), parts(checkpoints(run)[-1]))


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_all_resume_bit_for_bit(tmp_path: Path, four: Path) -> None:
    run = copy_until(four, 2, tmp_path / "copy")
    found = run_processes(run, world=4, rank=2, fault="step", resume=True)
    assert [code for code, _ in found][2] == -9
    assert all(code != 0 for code, _ in found), found
    assert int(checkpoints(run)[-1].name[5:]) in (2, 4)
    for code, told in run_processes(run, world=4, resume=True):
        assert code == 0, told
    assert_same(parts(checkpoints(run)[-1]), parts(checkpoints(four)[-1]))
    assert {step: loss for step, loss in losses(run).items() if step > 4} == {
        step: loss for step, loss in losses(four).items() if step > 4
    }


def test_a_checkpoint_is_cut_anew_for_another_layout(tmp_path: Path, four: Path) -> None:
    """Four processes' parts continued by one."""
    run = copy_until(four, 4, tmp_path / "copy")
    table = to_toml({"layout": HSDP_CP}).strip()
    assert table in run.read_text()
    run.write_text(run.read_text().replace(table, ""))
    train(run, resume=True, live=False)
    assert_near(run, four, first=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{}, {"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "tp": 2}, {"cp": 4}],
    ids=lambda layout: ",".join(layout) or "alone",
)
def test_two_epochs_read_every_token_twice(tmp_path: Path, layout: dict[str, int]) -> None:
    """Counted in the processes of a run: 40 files of lognormal lengths, every token another id."""
    tokens, config = 2048, {**CONFIG, "vocab_size": 2048}
    cuts = np.sort(np.random.default_rng(0).lognormal(0, 1, 40).cumsum())
    ends = (cuts / cuts[-1] * tokens).astype(int)[:-1]
    run = make_run(
        tmp_path,
        model={"config": config},
        layout=layout,
        data={"train": ["part-*.npy"]},
        tokens=2 * tokens,
        batch_tokens=512,
        context=64,
    )
    for number, ids in enumerate(np.split(np.arange(tokens, dtype=np.uint16), ends)):
        np.save(tmp_path / f"part-{number:02}.npy", ids)
    world = int(np.prod([*layout.values(), 1]))
    for code, told in run_processes(run, world=world):
        assert code == 0, told
    read = np.concatenate([ids_read(run, place) for place in range(world)])
    same = layout.get("tp", 1)  # so many processes read the same tokens
    assert (np.bincount(read, minlength=tokens) == 2 * same).all()


def test_processes_with_different_run_files_are_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"layout": {"dp_shard": 2}}
    one, two = make_run(tmp_path / "one", **changes), make_run(tmp_path / "two", seed=1, **changes)
    for code, told in run_processes([one, two]):
        assert code == 2, told
        assert "process 1 is not like process 0" in told
        assert "seed: 0 → 1" in told


def test_a_data_error_on_one_process_is_recorded_as_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, layout={"dp_shard": 2})
    (left, told), (code, error) = run_processes(run, world=2, rank=1, fault="data")
    assert code == 2
    assert "the shard b.npy cannot be read" in error
    assert left != 0
    assert "It ended by DataError: the shard b.npy cannot be read on this machine. " in " ".join(told.split())
    assert main(["why-stuck", str(tmp_path / "out" / "stuck"), "--json"]) == 0
    finding = json.loads(capsys.readouterr().out)
    assert finding["ranks"] == [1]
    assert "It ended by DataError" in finding["answer"]


def test_an_error_of_all_is_no_hang(tmp_path: Path) -> None:
    run = make_run(tmp_path, layout={"dp_shard": 2}, optimizer={"lr": 1e12}, clip=False)
    for code, told in run_processes(run, world=2):
        assert code == 2, told
        assert told.count("Next: look at the batch") == 1
        assert "why-stuck" not in told


@pytest.mark.slow
def test_long_work_of_the_first_process_is_waited_for(tmp_path: Path) -> None:
    """Checksums before the first step and the trained model's files after the last take longer than `timeout_s`."""
    run = make_run(tmp_path, layout={"dp_shard": 2}, timeout_s=4.0)
    for code, told in run_processes(run, world=2, fault="slow"):
        assert code == 0, told
        assert not told


@pytest.mark.slow
def test_asking_one_process_to_leave_saves_all(tmp_path: Path) -> None:
    """8-bit moments are kept by each process as they are, and the signal is agreed on."""
    run = make_run(tmp_path, layout={"dp_shard": 2}, optimizer={"name": "adamw8bit", "lr": 3e-3})
    found = run_processes(run, world=2, rank=1, fault="term")
    assert [code for code, _ in found] == [143, 143], found
    assert checkpoints(run)[-1].name == "step-00000005"
    for code, told in run_processes(run, world=2, resume=True):
        assert code == 0, told
    assert sorted(losses(run)) == [1, 2, 3, 4, 5, 6]
