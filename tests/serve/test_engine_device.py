"""The serving engine on devices: `triton_engine.py` in processes of their own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from nested import can_interpret, run_file

FILE = Path(__file__).with_name("triton_engine.py")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (`pip install triton`)"
)


@pytest.mark.slow
@needs_triton
@can_interpret
def test_in_the_interpreter() -> None:
    run_file(FILE, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.cuda
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_card() -> None:
    run_file(FILE, TRITON_INTERPRET="0")
