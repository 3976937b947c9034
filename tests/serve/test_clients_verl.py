"""verl: its client of SGLang servers draws from the server as it is; weights come from a folder by a few lines more."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from http_support import command

from torchwright.workloads.language import BUNDLED

CLIENT = Path(__file__).parent / "verl_client.py"

pytestmark = pytest.mark.slow


def test_verls_client_draws_pauses_and_changes_weights(tmp_path: Path) -> None:
    python = os.environ.get("VERL_PYTHON")
    if python is None:
        pytest.skip("no verl here: `pip install --no-deps verl`, and VERL_PYTHON=PATH of its environment")
    with command("--allow-weights", str(tmp_path), "--dtype", "bf16") as server:
        words = [python, str(CLIENT), server.url, str(tmp_path), str(BUNDLED)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    first, second = found["first"], found["second"]
    assert len(first["output_ids"]) == len(second["output_ids"]) == 8
    assert len(first["meta_info"]["output_token_logprobs"]) == 8
    assert found["models"]["data"]
    assert found["waits"], "a request that comes while the server is trained for waits for the new weights"
    assert found["updated"]["success"]
    versions = [fact["version"] for fact in second["meta_info"]["weight_versions"]]
    assert versions == ["1"]
    assert not list(tmp_path.iterdir())
    assert found["refused"] == {"tensors": 404, "release": 404}
