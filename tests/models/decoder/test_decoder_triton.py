"""The decoder on Triton's kernels: `triton_decoder.py` in processes of their own, and devices that are not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from nested import can_interpret, run_file
from torchwright.core.errors import TorchwrightError, UnknownName
from torchwright.models.decoder import load_decoder
from torchwright.workloads.language import BUNDLED

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (`pip install triton`)"
)


FILE = Path(__file__).with_name("triton_decoder.py")


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(TorchwrightError, match="'cuda' was asked for, but it cannot be used here"):
        load_decoder(BUNDLED, device="cuda")


def test_a_device_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'cuda'"):
        load_decoder(BUNDLED, device="cudo")
