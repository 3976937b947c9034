"""Triton's kernels compiled for cards that are not there: PTX for Hopper and Ampere, down to the matrix instructions.

The interpreter takes programs that the compiler refuses (types that change in a loop, arguments that are 1 and become
constants), and says nothing about what a card would run.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (`pip install triton`)", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchwright.hardware.kernels.gpu import attention, grid, linear, pointwise

POINTERS = {"bf16": "*bf16", "f32": "*fp32", "i8": "*i8", "u8": "*u8", "i32": "*i32", "i64": "*i64"}
FLOATS = {"scale", "cap", "eps"}
"""Scalar arguments that are no integers."""


@pytest.fixture(autouse=True)
def fresh(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was compiled before is taken."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))


def ptx(
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    *,
    sm: int,
    warps: int,
    ones: tuple[str, ...] = (),
) -> str:
    """The kernel as it is compiled for a call with these types; `ones` are the arguments that are 1."""
    names = kernel.arg_names
    constants = constants | dict.fromkeys(ones, 1)
    signature = {
        name: "constexpr"
        if name in constants
        else POINTERS[pointers[name]]
        if name in pointers
        else "fp32"
        if name in FLOATS
        else "i32"
        for name in names
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    options = {"num_warps": warps, "num_stages": 4, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options).asm["ptx"]


def linear_ptx(bits: int, *, whole: bool, rows: int, sm: int, ones: tuple[str, ...] = ()) -> str:
    how = linear.plan(rows, 2048, 2048, bits, whole=whole)
    weight = {16: "bf16", 8: "i8", 4: "u8"}[bits]
    pointers = {
        "x": "i8" if whole else "bf16",
        "weight": weight,
        "multipliers": "bf16" if bits == 16 else "i8",
    }
    pointers |= {
        "row_scale": "f32",
        "scale": "f32",
        "bias": "f32",
        "out": "bf16",
        "parts": "i32" if whole else "f32",
    }
    constants = {"BITS": bits, "WHOLE": whole, "GROUP": 32, "EVEN": True, "BIASED": True, "SPANS": how.spans}
    constants |= {"APART": how.apart, "BLOCK_M": how.block_m, "BLOCK_N": how.block_n, "BLOCK_K": how.block_k}
    text = ptx(linear.linear_kernel, pointers, constants, sm=sm, warps=how.warps, ones=ones)
    if how.apart:
        del pointers["x"], pointers["weight"], pointers["multipliers"]
        constants = {name: constants[name] for name in linear.join_kernel.arg_names if name in constants}
        ptx(linear.join_kernel, pointers, constants, sm=sm, warps=4, ones=ones)
    return text


@pytest.mark.plain("90-4-False-1-wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16")
@pytest.mark.parametrize(
    ("sm", "bits", "whole", "rows", "wanted"),
    [
        (90, 16, False, 300, "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"),
        (90, 8, True, 1, "wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8"),
        (90, 4, True, 300, "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8"),
        (90, 4, False, 1, "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16"),
        (80, 8, True, 300, "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"),
    ],
)
def test_linear_layers_use_matrix_units(sm: int, bits: int, whole: bool, rows: int, wanted: str) -> None:
    assert wanted in linear_ptx(bits, whole=whole, rows=rows, sm=sm, ones=("rows",) if rows == 1 else ())


@pytest.mark.plain("90-bf16-True")
@pytest.mark.parametrize(
    ("sm", "pages", "apart"), [(90, "bf16", True), (90, "i8", False), (80, "bf16", False)]
)
def test_attention_uses_matrix_units(sm: int, pages: str, apart: bool) -> None:
    """`apart` is a decode step of one token with a window of one key: every integer that can be 1 is."""
    pointers = {
        "q": "bf16",
        "k_pages": pages,
        "v_pages": pages,
        "k_scale": "f32",
        "v_scale": "f32",
        "tables": "i32",
    }
    pointers |= {"starts": "i32", "contexts": "i32", "out": "bf16", "parts": "f32", "part_sums": "f32"}
    shape = {"D": 64, "BLOCK_D": 64}
    constants = {
        "HEADS": 8,
        "GROUP": 4,
        "BLOCK_M": 64,
        "BLOCK_S": 64,
        "SPAN_KEYS": 256,
        "NARROW": True,
        **shape,
    }
    constants |= {"SCALED": pages == "i8", "CAPPED": not apart, "APART": apart}
    ones = ("tokens", "sequences", "table_width", "page_count", "window") if apart else ()
    text = ptx(attention.attention_kernel, pointers, constants, sm=sm, warps=4, ones=ones)
    assert ("wgmma.mma_async" if sm == 90 else "mma.sync.aligned.m16n8k16") in text
    if apart:
        pointers = {"parts": "f32", "part_sums": "f32", "out": "bf16"}
        ptx(attention.join_kernel, pointers, {**shape, "BLOCK_R": 4}, sm=sm, warps=4, ones=("rows", "spans"))


@pytest.mark.slow
@pytest.mark.parametrize(("sm", "width"), [(90, 64), (90, 16), (80, 64)])
def test_attention_over_a_grid_uses_matrix_units(sm: int, width: int) -> None:
    pointers = {"q": "bf16", "k": "bf16", "v": "bf16", "places": "f32", "out": "bf16"}
    constants = {
        "D": 64,
        "BLOCK_D": 64,
        "BLOCK_M": 64,
        "BLOCK_X": width,
        "ROWS": 64 // width,
        "WIDE": False,
        "NARROW": True,
    }
    for ones in ((), ("height", "width", "heads")):
        text = ptx(grid.grid_kernel, pointers, constants, sm=sm, warps=4, ones=ones)
        assert ("wgmma.mma_async" if sm == 90 else "mma.sync.aligned.m16n8k16") in text


@pytest.mark.slow  # Triton's interpreter runs them in the tests of each
def test_the_others_compile() -> None:
    def compiles(kernel: Any, pointers: str, constants: dict[str, Any], ones: tuple[str, ...] = ()) -> None:
        named = dict(part.split(":") for part in pointers.split())
        assert ".entry" in ptx(kernel, named, constants, sm=90, warps=4, ones=ones)

    compiles(linear.quantize_kernel, "x:bf16 integers:i8 row_scale:f32", {"BLOCK": 2048})
    norm = "x:bf16 residual:bf16 weight:f32 out:bf16 total_out:bf16"
    compiles(pointwise.rms_norm_kernel, norm, {"ADDS": True, "BLOCK": 2048})
    compiles(pointwise.gated_kernel, "x:bf16 out:bf16", {"SILU": False, "BLOCK": 1024})
    rope = "qkv:bf16 cos:f32 sin:f32 positions:i64 slots:i64 k_scale:f32 v_scale:f32 q_norm:f32 k_norm:f32 q_out:bf16"
    sizes = {"HEADS": 32, "KV_HEADS": 8, "D": 64, "HALF": 32, "ROWS": 16, "BLOCK": 64}
    for pages, norms in (("bf16", True), ("i8", False)):
        flags = {"Q_NORM": norms, "K_NORM": norms, "SCALED": pages == "i8"}
        compiles(
            pointwise.rope_kernel,
            f"{rope} k_pages:{pages} v_pages:{pages}",
            sizes | flags,
            ("angles", "slot_count"),
        )
