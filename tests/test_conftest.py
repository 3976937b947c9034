"""The counts of mutants in the summary of a test run, and the durations of its phases in a file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from durations import summary

COUNTING = """
import pytest
@pytest.mark.parametrize("seed", [1, 2])
def test_fuzz(record_property, seed):
    record_property("counts", f"7 mutants of seed {seed}: refused 7")
    assert seed == 1
"""


def test_what_a_fuzz_counted_is_printed_whether_it_passed_or_not(tmp_path: Path) -> None:
    """In worker processes, as in the nightly run: pytest prints nothing of a test there that passes."""
    for name in ("conftest.py", "durations.py"):
        shutil.copy(Path(__file__).parent / name, tmp_path)
    (tmp_path / "test_counting.py").write_text(COUNTING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = ["-m", "pytest", "-p", "xdist.plugin", "-q", "-n", "1", "--durations-to", "seconds.jsonl", "."]
    # Other plugins take seconds to import.
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False, env=alone
    )
    assert ran.returncode == 1
    lines = ran.stdout.splitlines()
    assert lines.count("7 mutants of seed 1: refused 7") == 1
    assert lines.count("7 mutants of seed 2: refused 7") == 1
    rows = [json.loads(line) for line in (tmp_path / "seconds.jsonl").read_text().splitlines()]
    phases = [("test_counting.py::test_fuzz[1]", when, "gw0") for when in ("setup", "call", "teardown")]
    assert [(row["id"], row["when"], row["worker"]) for row in rows][:3] == phases
    assert len(rows) == 6
    assert all(row["wall"] >= 0 and row["cpu"] >= 0 for row in rows)
    ranked = summary(rows).splitlines()
    assert ranked[0].endswith("2 tests")
    assert ranked[1].startswith("gw0: from 0 to ")
