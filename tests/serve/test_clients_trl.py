"""TRL: its client draws from the server as it is, and its GRPO trains on what each step's weights draw there.

A set of weights comes from a folder: TRL's own way, over NCCL, needs a device.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from http_support import command

from torchwright.workloads.language import BUNDLED

CLIENT = Path(__file__).parent / "trl_client.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo" / "with_trl.py"
STEPS = 4

pytestmark = pytest.mark.slow


def run(*words: str) -> Any:
    """What a program of TRL's environment prints last."""
    python = os.environ.get("TRL_PYTHON")
    if python is None:
        pytest.skip("no TRL here: `pip install trl`, and TRL_PYTHON=PATH of its environment")
    done = subprocess.run([python, *words], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_trls_client_draws_as_from_vllm() -> None:
    with command() as server:
        found = run(str(CLIENT), server.url)
    drawn, top, chat = found["drawn"], found["top"], found["chat"]
    assert drawn["prompt_ids"] == [[5, 6, 7, 8], [9, 10, 11]]
    assert len(drawn["completion_ids"]) == len(chat["completion_ids"]) == 4
    for kind in (drawn, top, chat):
        for ids, logprobs, names in zip(
            kind["completion_ids"], kind["logprobs"], kind["logprob_token_ids"], strict=True
        ):
            assert len(ids) == len(logprobs) == len(names)
            assert all(id in among for id, among in zip(ids, names, strict=True))
            assert all(value <= 0 for values in logprobs for value in values)
    assert {len(names) for names in top["logprob_token_ids"][0]} <= {2, 3}
    assert found["refused"], "its way for weights is NCCL's, which the server has not"


def test_grpo_learns_from_the_server(tmp_path: Path) -> None:
    """Every step's completions come from the weights of the step before, and of no others."""
    with command("--allow-weights", str(tmp_path), "--dtype", "bf16") as server:
        words = [str(BUNDLED), server.url, str(tmp_path), "--steps", str(STEPS)]
        found = run(str(EXAMPLE), *words)
    first, *later = found["versions"]
    assert len(first) == 1
    assert later == [[str(step)] for step in range(1, STEPS)]
    assert len(found["rewards"]) == STEPS
    assert len(set(found["rewards"])) > 1
