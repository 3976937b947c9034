"""Packages with a technique, a workload, an engine, a device and an export target, installed by pip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/pyproject.toml"))
NAMES = ("tanh_gelu", "forecast", "frozen_trace", "freeze_trace", "abacus", "null", "numpy")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds all of them installed; pip asks no index and makes no virtual one."""
    folder, target = tmp_path_factory.mktemp("examples"), tmp_path_factory.mktemp("site")
    sources = [shutil.copytree(path, folder / path.name) for path in EXAMPLES]  # a build leaves files there
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), *map(str, sources)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    path = [str(target), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTEST_ADDOPTS": ""}


def run(environment: dict[str, str], folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_contract_tests_run_for_each(installed: dict[str, str], tmp_path: Path) -> None:
    arguments = ("-q", "-rA", "-p", "no:cacheprovider", "-k", " or ".join(NAMES))
    out = run(installed, tmp_path, "pytest", "--pyargs", "torchwright.testing", *arguments)
    passed = [line for line in out.splitlines() if line.startswith("PASSED")]
    for name in NAMES:
        assert any(name in line for line in passed), f"no test has run for {name}"
    skipped = [line for line in out.splitlines() if line.startswith("SKIPPED")]
    refused = [line for line in skipped if "frozen_trace refuses this model: " in line]
    assert refused == skipped


@pytest.mark.slow
def test_the_command_line_knows_them(installed: dict[str, str], tmp_path: Path) -> None:
    code = "from torchwright.cli import main; main(['techniques']); main(['workloads'])"
    listed = subprocess.run(
        [sys.executable, "-c", code],
        env=installed | {"COLUMNS": "120"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "GELU layers compute its approximation by tanh" in listed
    assert "relative error of what it says comes next" in listed
