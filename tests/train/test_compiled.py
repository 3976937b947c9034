"""A run's compiled code travels with it: who goes on with a clean cache compiles nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import assert_same, checkpoints, make_run, state

from torchwright.core.errors import WorkloadError
from torchwright.train.ledger import read_account
from torchwright.train.run.runtime.compiled import FOLDER, CompiledCode
from torchwright.train.run.runtime.processes import ProcessRank


def place(rank: int = 0) -> ProcessRank:
    return ProcessRank(rank=rank, world=2, device="cpu")


def test_nothing_new_is_not_packed(tmp_path: Path) -> None:
    packed: list[tuple[Path, list[str]]] = []

    def pack(folder: Path, made_by: str, calls: list[str]) -> None:
        packed.append((folder, list(calls)))

    code = CompiledCode(tmp_path, place(1), trust=False, pack=pack)
    assert code.restore() is None
    assert code.keep() is None
    assert packed == []
    code.made("one")
    code.made("two")
    assert code.keep() is None
    assert code.keep() is None
    assert packed == [(tmp_path / "compiled" / "rank-00001", ["one", "two"])]


def test_what_cannot_be_kept_is_told_and_ends_no_run(tmp_path: Path) -> None:
    for error in (WorkloadError("there is nothing to pack"), OSError(28, "No space left on device")):

        def fails(*_args: object, error: Exception = error, **_options: object) -> None:
            raise error

        code = CompiledCode(tmp_path, place(), trust=False, pack=fails)
        code.made("one")
        assert str(error) in str(code.keep())


def test_a_damaged_bundle_is_told_and_ends_no_run(tmp_path: Path) -> None:
    folder = tmp_path / "compiled" / "rank-00000"
    folder.mkdir(parents=True)
    (folder / "bundle.json").write_text("{")
    for trust in (False, True):
        assert "made anew" in str(CompiledCode(tmp_path, place(), trust=trust).restore())


def train(run: Path, home: Path, cache: str, *words: str, ranks: int = 1) -> str:
    """A process, or several, with an Inductor cache of their own; what they printed."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(home / cache / "inductor"),
        "TORCHWRIGHT_CACHE": str(home / cache / "own"),
        "OMP_NUM_THREADS": "1",
    }
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [
        sys.executable,
        *(several if ranks > 1 else []),
        "-m",
        "torchwright",
        "train",
        str(run),
        *words,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_who_goes_on_compiles_nothing(tmp_path: Path) -> None:
    changes = {"compile": True, "tokens": 2 * 256}
    run = make_run(tmp_path / "run", **changes)
    train(run, tmp_path, "first")
    first = read_account(run.parent / "out").attempts[0]
    assert first.made is not None
    assert first.made > 0
    plain = make_run(tmp_path / "plain", **changes)
    train(plain, tmp_path, "first")
    for name in ("plain", "run"):
        make_run(tmp_path / name, **changes | {"tokens": 4 * 256})
    train(plain, tmp_path, "first", "--resume")
    # The same user: the same key, and a clean cache of torch's.
    shutil.copytree(tmp_path / "first" / "own", tmp_path / "second" / "own")
    train(run, tmp_path, "second", "--resume")
    account = read_account(run.parent / "out")
    second = account.attempts[1]
    assert second.made == 0
    assert second.found
    assert any("attempt 2 compiled nothing" in note for note in account.notes)
    assert_same(state(checkpoints(run)[-1]), state(checkpoints(plain)[-1]))
    # Another user takes it with trust alone.
    make_run(tmp_path / "run", **changes | {"tokens": 5 * 256})
    assert "--trust" in train(run, tmp_path, "third", "--resume")
    make_run(tmp_path / "run", **changes | {"tokens": 6 * 256})
    assert "--trust" not in train(run, tmp_path, "fourth", "--resume", "--trust")
    attempts = read_account(run.parent / "out").attempts
    assert attempts[2].made
    assert attempts[3].made == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_of_two_processes_has_its_own(tmp_path: Path) -> None:
    changes = {"compile": True, "context": 16, "batch_tokens": 128, "layout": {"dp_replicate": 2}}
    run = make_run(tmp_path / "run", **changes, tokens=2 * 128)
    train(run, tmp_path, "first", ranks=2)
    assert {path.name for path in (run.parent / "out" / FOLDER).iterdir()} == {
        "rank-00000",
        "rank-00001",
    }
    make_run(tmp_path / "run", **changes, tokens=4 * 128)
    shutil.copytree(tmp_path / "first" / "own", tmp_path / "second" / "own")
    train(run, tmp_path, "second", "--resume", ranks=2)
    account = read_account(run.parent / "out")
    first, second = account.attempts
    assert first.made
    assert second.made == 0
    assert second.found
    assert any("attempt 2 compiled nothing" in note for note in account.notes)
