"""packages/sim: torch.distributed on simulated devices, over gloo."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sim_support import install

PROGRAM = Path(__file__).parent / "on_device" / "ranks.py"


@pytest.mark.slow  # two processes, each with a device process
@pytest.mark.parametrize("what", ["collectives", "ddp", "fsdp"])
def test_two_ranks(what: str, tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = install(tmp_path) | {
        "TORCHWRIGHT_SIM": "memory=64MiB",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), what],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
