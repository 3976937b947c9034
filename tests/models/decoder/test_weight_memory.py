"""Weights that are larger than the memory that is free are refused before they are read, with what would fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from folders import causal, save
from torchwright.core.errors import ModelError
from torchwright.core.scheme import W8A8
from torchwright.hub.folder import read_config
from torchwright.models.decoder.weight_memory import count_weights, require_memory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(causal("Llama"), tmp_path)


def test_all_numbers_are_counted(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    count = count_weights(folder, read_config(folder))
    assert count.matrices + count.others == sum(tensor.numel() for tensor in tensors.values())
    assert count.others == sum(t.numel() for name, t in tensors.items() if t.ndim == 1 or "embed" in name)
    assert count.bytes_of(None, torch.bfloat16) == 2 * (count.matrices + count.others)
    assert count.bytes_of(W8A8, torch.bfloat16) == count.matrices + 2 * count.others


def test_what_does_not_fit_is_refused_with_what_does(folder: Path) -> None:
    described = read_config(folder)
    count = count_weights(folder, described)
    whole = count.bytes_of(None, torch.bfloat16)
    require_memory(folder, described, None, torch.bfloat16, available=whole)
    with pytest.raises(ModelError, match=r"needed, .* free.*--quantize w8a8 takes about"):
        require_memory(folder, described, None, torch.bfloat16, available=whole - 1)
    least = count.bytes_of(W8A8, torch.bfloat16)
    with pytest.raises(ModelError, match="--quantize w4a"):
        require_memory(folder, described, None, torch.bfloat16, available=least - 1)
    with pytest.raises(ModelError, match="take a smaller model"):
        require_memory(folder, described, None, torch.bfloat16, available=1)
    with pytest.raises(ModelError, match="take a smaller model"):
        require_memory(folder, described, None, torch.bfloat16, schemes=False, available=whole - 1)


def test_a_quantized_checkpoint_takes_what_its_files_take(folder: Path) -> None:
    described = read_config(folder) | {"quantization_config": {}}
    tensors = load_file(folder / "model.safetensors")
    stored = sum(tensor.nbytes for tensor in tensors.values())
    require_memory(folder, described, None, torch.bfloat16, available=stored)
    with pytest.raises(ModelError, match="take a smaller model"):
        require_memory(folder, described, None, torch.bfloat16, available=stored - 1)
    require_memory(
        folder, described, W8A8, torch.bfloat16, available=1
    )  # the files do not say what it becomes


def test_a_damaged_file_is_left_to_the_reader(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no header")
    require_memory(folder, json.loads((folder / "config.json").read_text()), None, torch.float32, available=1)
