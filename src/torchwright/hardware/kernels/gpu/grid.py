"""Attention over a grid of places with decomposed relative positions (SAM's encoder); its bias is never written.

A query's products with the vectors of all distances in rows and columns, 2·(Y + X) - 2 numbers, are made by a matrix
product before. A tile is BLOCK_M queries and whole rows of the grid as keys, of which the numbers for columns are read
once for all tiles; of a grid wider than a tile it is a part of one row.

Decomposed positions: Li et al., 2022 (MViTv2). Softmax with running maximum in tiles: Dao et al., 2022.
"""

# Kernels are compiled by Triton, not run by Python: a type checker knows neither tiles nor launches.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torchwright.hardware.kernels.gpu import check
from torchwright.hardware.kernels.gpu.language import convert, dot
from torchwright.hardware.kernels.limits import LARGEST_HEAD_OF_GPUS

WIDEST = 64
"""Keys of a tile: several rows of a narrow grid, part of a row of a wider one."""


@triton.jit
def grid_kernel(
    q, k, v, places, out, height, width, heads, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_X: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """q, k, v (B · H, T, D); places (B · H, T, 2 · height + 2 · width - 2); out (B, T, H, D)."""
    batch_head = tl.program_id(1).to(tl.int64)
    tokens = height * width
    distances = 2 * height + 2 * width - 2
    t = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = t < tokens
    d = tl.arange(0, BLOCK_D)
    kind = tl.bfloat16 if NARROW else tl.float32
    first = batch_head * tokens
    q_at = (first + t)[:, None] * D + d[None, :]
    tile_q = convert(tl.load(q + q_at, mask=real[:, None] & (d[None, :] < D), other=0.0), kind)
    # Of a key in row y and column x: the number y places before these, and the one x before those.
    by_row = places + (first + t) * distances + (t // width + height - 1)
    by_column = places + (first + t) * distances + (2 * height - 1) + (t % width + width - 1)
    # Keys of a tile: ROWS rows of the grid, BLOCK_X places of each.
    n = tl.arange(0, ROWS * BLOCK_X)
    across, down = n % BLOCK_X, n // BLOCK_X
    # Where a tile has whole rows, the numbers of columns are the same for all tiles.
    of_column = tl.load(
        by_column[:, None] - across[None, :], mask=real[:, None] & (across < width)[None, :], other=0.0
    )
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for top in range(0, height, ROWS):
        y = top + down
        if ROWS == 1:
            of_row = tl.load(by_row - top, mask=real, other=0.0)[:, None]
        else:
            inside = real[:, None] & (y < height)[None, :]
            of_row = tl.load(by_row[:, None] - y[None, :], mask=inside, other=0.0)
        for start in range(0, width, BLOCK_X):
            x = start + across
            there = (x < width) & (y < height)
            if WIDE:
                of_column = tl.load(
                    by_column[:, None] - x[None, :], mask=real[:, None] & there[None, :], other=0.0
                )
            s = first + y * width + x
            tile_k = tl.load(
                k + s[None, :] * D + d[:, None], mask=there[None, :] & (d[:, None] < D), other=0.0
            )
            score = dot(tile_q, convert(tile_k, kind), tl.zeros((BLOCK_M, ROWS * BLOCK_X), tl.float32))
            score = score * scale + of_row + of_column
            score = tl.where(there[None, :], score * 1.4426950408889634, float("-inf"))
            highest = tl.maximum(peak, tl.max(score, 1))
            part = tl.exp2(score - highest[:, None])
            shrink = tl.exp2(peak - highest)
            weight = weight * shrink + tl.sum(part, 1)
            tile_v = tl.load(
                v + s[:, None] * D + d[None, :], mask=there[:, None] & (d[None, :] < D), other=0.0
            )
            total = dot(convert(part, kind), convert(tile_v, kind), total * shrink[:, None])
            peak = highest
    batch, head = batch_head // heads, batch_head % heads
    out_at = ((batch * tokens + t) * heads + head)[:, None] * D + d[None, :]
    made = convert(total / weight[:, None], out.dtype.element_ty)
    tl.store(out + out_at, made, mask=real[:, None] & (d[None, :] < D))


def grid_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, scale: float
) -> torch.Tensor:
    """(B, H, T, D) of q, k and v (B, H, T, D) over T = Y · X places, row after row.

    To the score of a query at (y, x) and a key at (y', x') come q · rows[y - y' + Y - 1] and
    q · columns[x - x' + X - 1]; rows (2 · Y - 1, D), columns (2 · X - 1, D).
    """
    height, width = _grid(q, k, v, rows, columns)
    B, H, T, D = q.shape
    out = q.new_empty((B, T, H, D))
    if not out.numel():
        return out.transpose(1, 2)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    table_ND = torch.cat([rows.float(), columns.float()])
    places = torch.matmul(q.float(), table_ND.t())
    block_d, block_x = max(16, triton.next_power_of_2(D)), min(WIDEST, max(16, triton.next_power_of_2(width)))
    # float32 has no matrix unit that takes it whole, and large tiles take minutes to compile.
    block_m = 16 if q.dtype == torch.float32 else 64 if block_d <= 128 else 32
    grid_kernel[(triton.cdiv(T, block_m), B * H)](
        q, k, v, places, out, height, width, H, float(scale),
        D=D, BLOCK_D=block_d, BLOCK_M=block_m, BLOCK_X=block_x, ROWS=WIDEST // block_x, WIDE=width > block_x,
        NARROW=q.dtype != torch.float32,
        num_warps=4 if block_d <= 64 else 8, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    return out.transpose(1, 2)


def _grid(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
) -> tuple[int, int]:
    """Return height and width of the grid; raises for other tensors, as the C++ does."""
    check.floats(q, "q")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}; one type is wanted")
    if q.dim() != 4 or k.shape != q.shape or v.shape != q.shape or q.shape[3] > LARGEST_HEAD_OF_GPUS:
        raise ValueError(
            f"q, k and v of shape {list(q.shape)}, {list(k.shape)} and {list(v.shape)}; (B, H, T, D) is wanted"
        )
    if rows.dim() != 2 or columns.dim() != 2:
        raise ValueError(
            f"rows of shape {list(rows.shape)} and columns of shape {list(columns.shape)} are no tables of vectors"
        )
    height, width = (len(rows) + 1) // 2, (len(columns) + 1) // 2
    if q.shape[2] != height * width:
        raise ValueError(f"{q.shape[2]} queries and {k.shape[2]} keys are no grid of {height} x {width}")
    for name, table, extent in (("rows", rows, height), ("columns", columns, width)):
        if table.shape != (2 * extent - 1, q.shape[3]) or not table.is_floating_point():
            raise ValueError(
                f"{name} is {table.dtype} {list(table.shape)}; a vector of {q.shape[3]} features for each of "
                f"{2 * extent - 1} distances is wanted"
            )
        if table.device != q.device:
            raise ValueError(f"{name} lies on {table.device}, not on {q.device}")
    return height, width
