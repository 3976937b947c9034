"""A file of tests in a process of its own, for what is chosen when a package is imported (Triton's interpreter)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_file(file: Path, **environment: str) -> None:
    """Run its tests with these variables set; fails with their output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "--no-header", str(file)],
        env=os.environ | environment | {"PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
