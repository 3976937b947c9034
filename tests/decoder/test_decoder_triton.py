"""The decoder on Triton's kernels: `triton_decoder.py` in processes of their own, and devices that are not there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchwright.decoder import load_decoder
from torchwright.errors import TorchwrightError, UnknownName
from torchwright.workloads.language import BUNDLED

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (`pip install triton`)"
)


def run(**environment: str) -> None:
    file = Path(__file__).with_name("triton_decoder.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "--no-header", str(file)],
        env=os.environ | environment | {"PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@needs_triton
def test_in_the_interpreter() -> None:
    run(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.cuda
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_card() -> None:
    run(TRITON_INTERPRET="0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(TorchwrightError, match="'cuda' was asked for, but it cannot be used here"):
        load_decoder(BUNDLED, device="cuda")


def test_a_device_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'cuda'"):
        load_decoder(BUNDLED, device="cudo")
