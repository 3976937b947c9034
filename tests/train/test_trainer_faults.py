"""What goes wrong in a run, in one process: killed, asked to leave, no room, damaged files, no number."""

from __future__ import annotations

import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from runs import assert_same, checkpoints, losses, make_run, run_processes, state
from safetensors import SafetensorError

from torchwright.train.data.shards import DataError
from torchwright.train.layout import LayoutError
from torchwright.train.model import weights
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.loop.train import TrainingStopped, train
from torchwright.train.run.runtime.checkpoint import CheckpointError
from torchwright.train.run.runtime.processes import processes


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("uninterrupted"))
    train(run, live=False)
    return run


@pytest.mark.plain("renaming--9-left2")
@pytest.mark.parametrize(
    ("fault", "code", "left"),
    [
        ("step", -signal.SIGKILL, [2]),
        ("writing", -signal.SIGKILL, [2]),
        ("renaming", -signal.SIGKILL, [2]),
        ("full", 2, [2]),
        ("term", 128 + signal.SIGTERM, [2, 3]),
    ],
)
def test_what_a_fault_leaves_is_continued(
    tmp_path: Path, uninterrupted: Path, fault: str, code: int, left: list[int]
) -> None:
    """In the fourth step, or the checkpoint after it; the end is that of a run without fault, bit for bit."""
    run = make_run(tmp_path)
    ((got, told),) = run_processes(run, fault=fault)
    assert got == code, told
    assert [int(path.name[5:]) for path in checkpoints(run)] == left, told
    if fault == "full":
        assert "the checkpoint of step 4 could not be written" in told
        assert "File too large" in told
        assert "step-00000002" in told
        assert not list((run.parent / "out" / "checkpoints").glob("*.new"))
    train(run, live=False)
    assert_same(state(checkpoints(run)[-1]), state(checkpoints(uninterrupted)[-1]))
    assert losses(run) == losses(uninterrupted)


def test_a_damaged_checkpoint_is_named_and_nothing_overwritten(tmp_path: Path, uninterrupted: Path) -> None:
    shutil.copytree(uninterrupted.parent, tmp_path / "copy")
    run = tmp_path / "copy" / "run.toml"
    shutil.rmtree(run.parent / "out" / "model")
    first, last = checkpoints(run)
    (file,) = last.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(bytes(data))
    before = {path: path.read_bytes() for path in last.iterdir()}
    with pytest.raises(CheckpointError, match=rf"{last} is damaged: {file.name}.*before it is {first}"):
        train(run, resume=True, live=False)
    assert {path: path.read_bytes() for path in last.iterdir()} == before
    (last / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"is damaged: checkpoint\.json"):
        train(run, resume=True, live=False)
    shutil.rmtree(last)
    train(run, resume=True, live=False)
    assert_same(state(checkpoints(run)[-1]), state(checkpoints(uninterrupted)[-1]))


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, optimizer={"lr": 1e12, "weight_decay": 0.0}, clip=False, checkpoint={"every_steps": 1}
    )
    with pytest.raises(TrainingStopped) as caught:
        train(run, live=False)
    told = str(caught.value)
    step = int(told.split()[1])
    assert 2 <= step <= 6
    assert f"windows {(step - 1) * 8} to {step * 8 - 1} (" in told
    assert ".npy at " in told
    assert f"the last good checkpoint is {checkpoints(run)[-1]}" in told
    assert checkpoints(run)[-1].name == f"step-{step - 1:08}"


def test_a_disk_that_is_full_for_the_trained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is in the last checkpoint; with room the same command writes the model and makes no step."""
    run = make_run(tmp_path)
    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    def no_room(*_: Any, **__: Any) -> None:
        raise full

    with monkeypatch.context() as patched:
        patched.setattr(weights, "save_file", no_room)
        with pytest.raises(
            CheckpointError, match=r"model could not be written.*No space left.*step 6 is whole"
        ):
            train(run, live=False)
    out = run.parent / "out"
    assert not (out / "model").exists()
    assert not list(out.glob("*.new"))
    outcome = train(run, live=False)
    assert outcome.model == out / "model"
    assert outcome.loss is None


def test_a_damaged_data_shard_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / "b.npy").write_bytes((tmp_path / "b.npy").read_bytes()[:-100])
    with pytest.raises(DataError, match=r"b\.npy cannot be read"):
        train(run, live=False)
    assert not checkpoints(run)


def test_other_data_does_not_resume(tmp_path: Path, uninterrupted: Path) -> None:
    shutil.copytree(uninterrupted.parent, tmp_path / "copy")
    (tmp_path / "copy" / "b.npy").write_bytes((tmp_path / "copy" / "a.npy").read_bytes())
    with pytest.raises(CheckpointError, match="train_tokens: 5000 → 6000"):
        train(tmp_path / "copy" / "run.toml", resume=True, live=False)


def test_a_layout_for_other_processes_says_what_fits(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"takes 2 processes.*Found: 1 processes.*start 2 processes"):
        train(make_run(tmp_path, layout={"dp_shard": 2}), live=False)


@pytest.mark.parametrize("missing", ["port", "peer", "variable"])
def test_processes_that_cannot_meet_are_no_fault_of_the_program(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Another program listens where they meet; nobody does; nobody said where."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if missing != "port":
            taken.close()
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        if missing == "variable":
            monkeypatch.delenv("MASTER_ADDR")
        words = (
            "cannot meet.*MASTER_ADDR" if missing == "variable" else "cannot reach each other.*MASTER_PORT"
        )
        with pytest.raises(RunError, match=words), processes(1.0):
            pytest.fail("they met")


def test_a_connection_that_is_lost_is_named_as_such() -> None:
    lost = (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4"
    )
    with pytest.raises(RunError, match=r"cannot reach each other.*Connection closed by peer"), processes(1.0):
        raise RuntimeError(lost)
    with pytest.raises(RuntimeError, match="of another kind"), processes(1.0):
        raise RuntimeError("of another kind")
