"""A file of tests in a process of its own, for what is chosen when a package is imported (Triton's interpreter)."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version


def _before(package: str, wanted: str) -> bool:
    try:
        return Version(metadata.version(package)) < Version(wanted)
    except metadata.PackageNotFoundError:
        return False


can_interpret = pytest.mark.skipif(
    _before("triton", "3.7") and not _before("numpy", "2.4"),
    reason="Triton before 3.7 cannot interpret with NumPy 2.4 and later (triton-lang/triton#9171)",
)
"""For what runs in Triton's interpreter; torch 2.11's build for GPUs brings Triton 3.6."""


def run_file(file: Path, **environment: str) -> None:
    """Run its tests with these variables set; fails with their output."""
    # It is no worker of pytest-xdist, whatever plugins may think that count those variables.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "--no-header", str(file)],
        env=inherited | environment | {"PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
