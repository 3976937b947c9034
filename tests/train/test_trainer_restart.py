"""Processes killed at random under `torchrun --max-restarts`: the run ends as one that nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import assert_same, checkpoints, losses, make_run
from test_trainer_parallel import parts

from torchwright.train.ledger import read_account

STEPS, WORLD, KILLS = 300, 4, 4


def torchrun(run: Path) -> subprocess.Popen[bytes]:
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}", "--max-restarts=20"]
    command = [sys.executable, *words, "--no-python", sys.executable, "-m", "torchwright", "train", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with run.with_suffix(".err").open("wb") as errors:
        return subprocess.Popen(
            [*command, "--quiet"], env=environment, stdout=errors, stderr=errors, start_new_session=True
        )


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes by /proc")
def test_random_kills_change_nothing(tmp_path: Path) -> None:
    changes = {
        "tokens": STEPS * 256,
        "layout": {"dp_shard": WORLD},
        "checkpoint": {"every_steps": 10, "keep": 99},
    }
    undisturbed, disturbed = (make_run(tmp_path / name, **changes) for name in ("one", "other"))
    assert torchrun(undisturbed).wait(300) == 0, undisturbed.with_suffix(".err").read_text()
    chance = random.Random(0)
    agent = torchrun(disturbed)
    try:
        for _ in range(KILLS):
            seen = len(checkpoints(disturbed))
            while len(checkpoints(disturbed)) < seen + 3 and agent.poll() is None:
                time.sleep(0.02)
            time.sleep(chance.uniform(0, 0.3))
            if victims := children(agent.pid):
                os.kill(chance.choice(victims), signal.SIGKILL)
        assert agent.wait(300) == 0, disturbed.with_suffix(".err").read_text()
    finally:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
    assert losses(disturbed) == losses(undisturbed)
    assert len(losses(disturbed)) == STEPS
    assert_same(parts(checkpoints(disturbed)[-1]), parts(checkpoints(undisturbed)[-1]))
    account = read_account(tmp_path / "other" / "out")
    assert len(account.attempts) > 1
    assert sum(account.seconds().values()) == pytest.approx(account.wall)
