"""A run under two torchruns, as on two nodes: each counts the restarts of its own process alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import assert_same, checkpoints, losses, make_run, run_processes
from safetensors.torch import load_file

from torchwright.train.ledger import read_account

LIMIT_S = 240


def processes(out: Path) -> dict[int, int]:
    """Rank → process, by the first lines of its ledgers."""
    lines = [
        json.loads(path.read_text().splitlines()[0]) for path in sorted((out / "ledger").glob("rank*.jsonl"))
    ]
    return {line["rank"]: line["pid"] for line in lines}


@pytest.mark.slow  # two torchruns, each of which starts its process twice
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_on_two_nodes_goes_on_after_a_process_died(tmp_path: Path, rank: int) -> None:
    changes = {"layout": {"dp_replicate": 2}, "tokens": 40 * 256, "timeout_s": 60}
    alone = make_run(tmp_path / "alone", **changes)
    assert [code for code, _ in run_processes(alone, world=2)] == [0, 0]
    file = make_run(tmp_path / "killed", **changes)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=run"]
    words += [
        f"--rdzv-endpoint=localhost:{port}",
        "--no-python",
        sys.executable,
        "-m",
        "torchwright",
        "train",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *words, str(file), "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    nodes = [subprocess.Popen(command, env=environment, start_new_session=True) for _ in range(2)]
    try:
        until = time.monotonic() + LIMIT_S
        while not checkpoints(file) and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(processes(file.parent / "out")[rank], signal.SIGKILL)
        assert [node.wait(LIMIT_S) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()
    assert len(read_account(file.parent / "out").attempts) == 2
    assert losses(file) == losses(alone)
    one, other = (load_file(each.parent / "out" / "model" / "model.safetensors") for each in (alone, file))
    assert_same(one, other)
