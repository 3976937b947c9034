"""DSPy runs against the server as it is, and gets its fields in their types."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from http_support import command

PROGRAM = Path(__file__).parent / "dspy_program.py"
NAME = "gpt-4o-mini"
"""A name that litellm, by which DSPy asks, knows as a model that takes schemas."""


@pytest.mark.slow
def test_dspy_gets_its_fields() -> None:
    python = os.environ.get("DSPY_PYTHON")
    if python is None:
        pytest.skip("no DSPy here: `pip install dspy`, and DSPY_PYTHON=PATH of its environment")
    with command("--served-model-name", NAME) as server:
        words = [python, str(PROGRAM), server.url, NAME]
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["at once"] == found["alone"], "greedy answers do not depend on their company"
    for fields in found["alone"]:
        assert fields["verdict"] in ("good", "bad")
        assert fields["topic"] in ("food", "weather", "other")
        assert isinstance(fields["sure"], bool)
    assert found["usage"] > 0
