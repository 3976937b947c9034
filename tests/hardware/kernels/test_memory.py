"""Memory of huge pages: zeros that are zeros, aligned, alive as long as their tensors."""

from __future__ import annotations

import gc
from io import FileIO
from pathlib import Path

import pytest
import torch

from torchwright.hardware.kernels.cpu.memory import HUGE, lasting, read, zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8])
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (1,), (5, 7), (HUGE + 1,), (3, HUGE // 2)])
def test_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = zeros(shape, dtype)
    assert (found.shape, found.dtype) == (shape, dtype)
    assert not found.any()
    assert not found.numel() or found.data_ptr() % HUGE == 0
    found.fill_(1)
    assert bool((found == 1).all())


def test_the_memory_lives_as_long_as_a_view_of_it() -> None:
    whole = zeros((2, HUGE), torch.int8)
    view = whole.fill_(7)[1, -5:]
    del whole
    gc.collect()
    others = [zeros((2, HUGE), torch.int8) for _ in range(4)]
    assert view.tolist() == [7] * 5
    assert not any(other.any() for other in others)


def test_copies_last() -> None:
    for given in (torch.randn(100), torch.randn(HUGE)):
        moved = lasting(given)
        assert torch.equal(moved, given)
        assert moved.data_ptr() != given.data_ptr()
        assert given.nbytes < HUGE or moved.data_ptr() % HUGE == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(0,), (5, 7), (3, HUGE // 2)])
def test_reading(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = torch.randint(-100, 100, shape).to(dtype)
    path = tmp_path / "bytes"
    path.write_bytes(b"before" + given.flatten().view(torch.uint8).numpy().tobytes() + b"after")
    with FileIO(path) as file:
        assert torch.equal(read(file, len(b"before"), shape, dtype), given)


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(99))
    with FileIO(tmp_path / "bytes") as file, pytest.raises(OSError, match=r"ends 1 bytes too early"):
        read(file, 0, (100,), torch.int8)
