"""Triton's kernels: their checks in its interpreter and on a card, what they compile to, and life without Triton."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nested import can_interpret, run_file
from torchwright.core.scheme import GROUPS
from torchwright.hardware.kernels import pack
from torchwright.hardware.kernels.gpu import operators
from torchwright.hardware.kernels.gpu import pack as gpu_pack

HERE = Path(__file__).parent
CHECKS = ["triton_linear.py", "triton_pointwise.py", "triton_attention.py", "triton_grid.py"]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (`pip install triton`)"
)


@pytest.mark.slow
@needs_triton
@can_interpret
@pytest.mark.parametrize("file", CHECKS)
def test_in_the_interpreter(file: str) -> None:
    run_file(HERE / file, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.cuda
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("file", CHECKS)
def test_on_a_card(file: str) -> None:
    run_file(HERE / file, TRITON_INTERPRET="0")


@needs_triton
def test_names_and_arguments_are_those_of_the_cpu(native: Any) -> None:
    assert operators.load_fault() is None
    for name, schema in operators.SCHEMAS.items():
        assert str(getattr(native, name).default._schema) == f"torchwright::{name}{schema}"


@needs_triton
def test_compiled_kernels_lie_where_only_this_user_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    operators._use_private_cache()
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    assert (folder, folder.stat().st_mode & 0o777) == (tmp_path / "inductor" / "triton" / "0", 0o700)
    folder.chmod(0o777)
    assert "others may write to it" in str(operators._attempt())


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "Triton is not installed" in (operators._attempt() or "")


@pytest.mark.parametrize("group", GROUPS)
def test_packing_is_undone(group: int) -> None:
    """And takes as many bytes as on a CPU, so that one description fits both."""
    random = torch.Generator().manual_seed(group)
    N, K = 70, 200
    groups = -(-K // group)
    integers = torch.randint(-8, 8, (N, K), generator=random).to(torch.int8)
    multipliers = torch.randint(-15, 16, (N, groups), generator=random).to(torch.int8)
    packed, depth = gpu_pack.pack_w4(integers, multipliers, group), pack.padded_depth(K, group)
    found, times = gpu_pack.unpack_w4(packed, N, depth, group)
    assert torch.equal(found[:, :K], integers)
    assert not found[:, K:].any()
    assert torch.equal(times[:, :groups], multipliers)
    assert packed.shape == pack.pack_w4(integers, multipliers, group).shape

    wide, weight = integers * 15, torch.randn(N, K, generator=random)
    depth = pack.padded_depth(K)
    assert torch.equal(gpu_pack.unpack_w8(gpu_pack.pack_w8(wide), N, depth)[:, :K], wide)
    assert torch.equal(gpu_pack.unpack_bf16(gpu_pack.pack_bf16(weight), N, depth)[:, :K], weight.bfloat16())
    assert gpu_pack.pack_w8(wide).shape == pack.pack_w8(wide).shape
    assert gpu_pack.pack_bf16(weight).shape == pack.pack_bf16(weight).shape


@needs_triton
@pytest.mark.parametrize("tokens", [1, 8, 496])
def test_spans_of_a_long_context_write_no_more_than_they_say(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight key heads for 32 query heads of 128, and a context of 131,072: 4 GB where nothing bounds it."""
    from torchwright.hardware.kernels.gpu import attention

    written = []

    class Launched:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **sizes: written.append(args[9].numel() + args[10].numel())

    monkeypatch.setattr(attention, "attention_kernel", Launched())
    monkeypatch.setattr(attention, "join_kernel", {(-(-tokens * 32 // 4),): lambda *args, **sizes: None})
    pages = 131_072 // 16
    with torch.device("meta"):
        attention.paged_attention(
            torch.empty(tokens, 32, 128, dtype=torch.bfloat16),
            torch.empty(pages, 8, 128, 16, dtype=torch.bfloat16),
            torch.empty(pages, 8, 16, 128, dtype=torch.bfloat16),
            None,
            None,
            torch.empty(1, pages, dtype=torch.int32),
            torch.empty(2, dtype=torch.int32),
            torch.empty(1, dtype=torch.int32),
            1.0,
            0,
            0.0,
        )
    assert 4 * written[0] <= 256 * 2**20
    assert (written[0] > 0) == (tokens < 496)
