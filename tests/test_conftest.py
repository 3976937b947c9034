"""The counts of mutants in the summary of a test run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

COUNTING = """
import pytest
@pytest.mark.parametrize("seed", [1, 2])
def test_fuzz(record_property, seed):
    record_property("counts", f"7 mutants of seed {seed}: refused 7")
    assert seed == 1
"""


def test_what_a_fuzz_counted_is_printed_whether_it_passed_or_not(tmp_path: Path) -> None:
    """In worker processes, as in the nightly run: pytest prints nothing of a test there that passes."""
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    (tmp_path / "test_counting.py").write_text(COUNTING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = [sys.executable, "-m", "pytest", "-q", "-n", "1", str(tmp_path)]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    lines = ran.stdout.splitlines()
    assert lines.count("7 mutants of seed 1: refused 7") == 1
    assert lines.count("7 mutants of seed 2: refused 7") == 1
