"""The header of a safetensors file: as the library writes it, and as nobody should."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from torchwright.hub.tensor_header import read_header


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_says_where_the_library_put_each_tensor(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b.c": torch.arange(7, dtype=torch.int16), "none": torch.zeros(0, 2)}
    file = tmp_path / "x.safetensors"
    save_file(tensors, file, metadata={"of": "a test"})
    found = read_header(file)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        stored = found[name]
        assert stored.shape == tuple(tensor.shape)
        assert file.read_bytes()[stored.begin : stored.end] == tensor.numpy().tobytes()
    assert [found[name].dtype for name in tensors] == ["F32", "I16", "F32"]


ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "length", "words"),
    [
        ({"a": ENTRY}, 10**9, "its header says that it is 1,000,000,000 bytes long"),
        ({"a": ENTRY}, 0, "0 bytes long"),
        (b"not JSON", None, "Expecting value"),
        ([1, 2], None, "does not say what its tensors are"),
        ({"a": {"dtype": "U8", "shape": [4]}}, None, "data_offsets"),
        ({"a": ENTRY | {"data_offsets": [0, 5]}}, None, "a ends at byte"),
        ({"a": ENTRY | {"data_offsets": [3, 1]}}, None, "a ends at byte"),
        ({"a": ENTRY | {"data_offsets": [-9, 4]}}, None, "a ends at byte"),
        ({"a": ENTRY | {"shape": 4}}, None, "does not say what its tensors are"),
    ],
)
def test_a_header_that_is_none_is_refused(
    tmp_path: Path, header: Any, length: int | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        read_header(write(tmp_path / "x.safetensors", header, b"four", length))


@given(st.binary(max_size=200))
def test_whatever_the_bytes_it_is_a_value_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.mktemp("any") / "x.safetensors"
    file.write_bytes(content)
    try:
        read_header(file)
    except ValueError:
        return
    assert json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]) is not None
