"""A disk that is full while a package is converted: exit code 2, and nothing half-written, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchwright.exporter.base import exports

LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
from torchwright.cli import main
sys.exit(main(sys.argv[2:]))
"""
MODEL = """
import torch
from torch import nn
def wide():
    return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).eval(), (torch.randn(2, 256),)
"""
REFERENCE, PACKAGE = 300_000, 527_000
"""Bytes that no file may be larger than: the weights beside the reference are, then the package alone."""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="no limit for a file's size")
@pytest.mark.parametrize("largest", [REFERENCE, PACKAGE])
@pytest.mark.parametrize("to", ["executorch", "litert", "onnx", "pt2"])
def test_nothing_is_left_of_what_does_not_fit(to: str, largest: int, tmp_path: Path) -> None:
    if reason := exports.get(to).unavailable() or exports.get(to).unwritable():
        pytest.skip(reason)
    (tmp_path / "models_of_mine.py").write_text(MODEL)
    words = ["export", "models_of_mine:wide", "--to", to, "-o", str(tmp_path / "out" / "package"), "--quiet"]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(largest), *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert "File too large" in done.stderr
    assert "this is a fault in Torchwright" not in done.stderr
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
