"""guidance and outlines run against the server as they are, with grammars in the syntax of each."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from http_support import MODEL, command

PROGRAMS = Path(__file__).parent / "guidance_programs.py"


def test_guidance_and_outlines_get_what_they_ask_for() -> None:
    python = os.environ.get("GUIDANCE_PYTHON")
    if python is None:
        pytest.skip(
            "no guidance here: `pip install guidance outlines`, and GUIDANCE_PYTHON=PATH of its environment"
        )
    with command() as server:
        words = [python, str(PROGRAMS), server.url, MODEL]
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert re.fullmatch(r"[A-Z]{2}-[0-9]{3}", found["guidance"]["code"])
    assert found["guidance"]["verdict"] in ("good", "bad")
    assert isinstance(json.loads(found["guidance"]["flag"])["ok"], bool)
    for name in ("from_vllm", "from_sglang"):
        assert found[name]["person"].keys() == {"name", "age"}
        assert re.fullmatch("[0-9]{4}", found[name]["regex"])
    assert re.fullmatch("yes|no!{1,3}", found["grammar"])
