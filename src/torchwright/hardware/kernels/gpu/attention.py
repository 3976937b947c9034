"""Attention over pages, prefill and decoding in one kernel.

A tile is BLOCK_M rows, the queries of one sequence with the query heads of one key-value head next to each other. Keys
are taken in spans of SPAN counted from the sequence's start, each with a softmax of its own, and the spans are joined
in their order. Few rows leave most of a GPU idle, and then each span gets a program; else one program takes all.
Either way a row meets the same tiles of keys in the same order, and one in which it sees nothing changes nothing: it
multiplies the row's sums by 1 and adds 0. So a result does not depend on neighbours, or on how a prompt was cut.

Softmax with running maximum: Milakov and Gimelshein, 2018; in tiles: Dao et al., 2022; split along the context: Dao et
al., 2023.
"""

# Kernels are compiled by Triton, not run by Python: a type checker knows neither tiles nor launches.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torchwright.hardware.kernels.gpu import check
from torchwright.hardware.kernels.gpu.language import convert, dot
from torchwright.hardware.kernels.reference import PAGE

SPAN = 256
"""Keys of a span."""
PROGRAMS = 256
"""Programs that keep a large GPU busy: with fewer tiles, spans get programs of their own."""
MOST_SUMS = 1 << 26
"""Numbers that spans apart may write for one call, 256 MiB. Beyond it, which takes dozens of tokens at a context of
100,000 and more, each tile's program takes all spans: a prompt's last chunk lasts as long as a whole one then."""


@triton.jit
def _sequence_of(tile, starts, sequences, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sequence of a tile: sequence b has those from starts[b] · GROUP // BLOCK_M + b on.

    So nobody has to count them before the launch; at most one in each sequence has nothing to do.
    """
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) * GROUP // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _soft_cap(score, cap):
    """cap · tanh(score / cap), without overflow."""
    shrink = tl.exp(-2.0 * tl.abs(score / cap))
    size = cap * ((1.0 - shrink) / (1.0 + shrink))
    return tl.where(score < 0, -size, size)


@triton.jit
def _joined(peak, weight, total, other_peak, other_weight, other_total):
    """Two softmax sums as one: the largest scores (rows,), sums of weights (rows,), and weighted values (rows, D)."""
    highest = tl.maximum(peak, other_peak)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    mine, others = tl.exp2(peak - base), tl.exp2(other_peak - base)
    weight = weight * mine + other_weight * others
    total = total * mine[:, None] + other_total * others[:, None]
    return highest, weight, total


@triton.jit
def _mean(total, weight, dtype: tl.constexpr):
    """Weighted values over their weights; rows of padding have none."""
    return convert(total / tl.where(weight == 0, 1.0, weight)[:, None], dtype)


@triton.jit
def _span(
    q, k_pages, v_pages, k_scale, v_scale, table, page_count, head, position, first, last, scale, cap, window,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """(largest scores, sums of weights, weighted values) of rows q (BLOCK_M, BLOCK_D) over keys `first` to `last`."""
    d = tl.arange(0, BLOCK_D)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    reach = tl.where(window == 0, 2147483647, window)
    for start in range(first, last, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        page = tl.load(table + s // 16, mask=s < last, other=-1).to(tl.int64)
        known = (page >= 0) & (page < page_count)
        page_head = page * HEADS + head
        place = s % 16
        k = tl.load(
            k_pages + (page_head * (16 * D) + place)[None, :] + d[:, None] * 16,
            mask=known[None, :] & (d[:, None] < D), other=0,
        )  # fmt: skip
        score = dot(q, convert(k, q.dtype), tl.zeros((BLOCK_M, BLOCK_S), tl.float32))
        if SCALED:
            score = score * tl.load(k_scale + page_head * 16 + place, mask=known, other=0.0)[None, :]
        score = score * scale
        if CAPPED:
            score = _soft_cap(score, cap)
        visible = known[None, :] & (s[None, :] <= position[:, None])
        visible = visible & (position[:, None] - s[None, :] < reach)
        score = tl.where(visible, score * 1.4426950408889634, float("-inf"))
        highest = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        part = tl.exp2(score - base[:, None])
        shrink = tl.exp2(peak - base)
        weight = weight * shrink + tl.sum(part, 1)
        if SCALED:
            part = part * tl.load(v_scale + page_head * 16 + place, mask=known, other=0.0)[None, :]
        v = tl.load(
            v_pages + (page_head * (16 * D) + place * D)[:, None] + d[None, :],
            mask=known[:, None] & (d[None, :] < D), other=0,
        )  # fmt: skip
        total = dot(convert(part, q.dtype), convert(v, q.dtype), total * shrink[:, None])
        peak = highest
    return peak, weight, total


@triton.jit
def attention_kernel(
    q, k_pages, v_pages, k_scale, v_scale, tables, starts, contexts, out, parts, part_sums,
    tokens, sequences, table_width, page_count, scale, cap, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, SPAN_KEYS: tl.constexpr,
    NARROW: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Rows of out, or where spans are APART one span's sums: parts (spans, T, H, D), part_sums (2, spans, T, H)."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = _sequence_of(tile, starts, sequences, GROUP, BLOCK_M)
    start = tl.load(starts + sequence)
    queries = tl.load(starts + sequence + 1) - start
    context = tl.minimum(tl.load(contexts + sequence), table_width * 16)
    first_row = (tile - start * GROUP // BLOCK_M - sequence) * BLOCK_M
    if first_row >= queries * GROUP:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    token = start + row // GROUP
    real = (row < queries * GROUP) & (token >= 0) & (token < tokens)
    position = context - queries + row // GROUP
    lowest = context - queries + first_row // GROUP
    last = tl.minimum(context, context - queries + (first_row + BLOCK_M - 1) // GROUP + 1)
    first = tl.where(window == 0, 0, tl.maximum(0, lowest - window + 1)) // BLOCK_S * BLOCK_S
    query_head = token.to(tl.int64) * (HEADS * GROUP) + head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    at = query_head[:, None] * D + d[None, :]
    inside = real[:, None] & (d[None, :] < D)
    tile_q = tl.load(q + at, mask=inside, other=0.0)
    tile_q = convert(tile_q, tl.bfloat16) if NARROW else convert(tile_q, tl.float32)
    table = tables + sequence.to(tl.int64) * table_width
    if APART:
        span = tl.program_id(2)
        # An argument that is 1 becomes a constant, which has no methods: the number of tokens is never asked to widen.
        row_of_span = span.to(tl.int64) * tokens * (HEADS * GROUP) + query_head
        weights_from = tl.num_programs(2).to(tl.int64) * tokens * (HEADS * GROUP)
        peak, weight, total = _span(
            tile_q, k_pages, v_pages, k_scale, v_scale, table, page_count, head, position,
            tl.maximum(first, span * SPAN_KEYS), tl.minimum(last, (span + 1) * SPAN_KEYS), scale, cap, window,
            HEADS, D, BLOCK_D, BLOCK_M, BLOCK_S, SCALED, CAPPED,
        )  # fmt: skip
        tl.store(parts + row_of_span[:, None] * D + d[None, :], total, mask=inside)
        tl.store(part_sums + row_of_span, peak, mask=real)
        tl.store(part_sums + weights_from + row_of_span, weight, mask=real)
    else:
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for span in range(first // SPAN_KEYS, tl.cdiv(last, SPAN_KEYS)):
            span_peak, span_weight, span_total = _span(
                tile_q, k_pages, v_pages, k_scale, v_scale, table, page_count, head, position,
                tl.maximum(first, span * SPAN_KEYS), tl.minimum(last, (span + 1) * SPAN_KEYS), scale, cap, window,
                HEADS, D, BLOCK_D, BLOCK_M, BLOCK_S, SCALED, CAPPED,
            )  # fmt: skip
            peak, weight, total = _joined(peak, weight, total, span_peak, span_weight, span_total)
        tl.store(out + at, _mean(total, weight, out.dtype.element_ty), mask=inside)


@triton.jit
def join_kernel(
    parts, part_sums, out, rows, spans, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr
):
    """BLOCK_R rows of out (T · H, D) from the sums of all spans."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = row < rows
    d = tl.arange(0, BLOCK_D)
    at = row[:, None] * D + d[None, :]
    inside = real[:, None] & (d[None, :] < D)
    peak = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_R,), tl.float32)
    total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    row_of_span = row
    for _ in range(spans):
        span_peak = tl.load(part_sums + row_of_span, mask=real, other=0.0)
        span_weight = tl.load(part_sums + spans * rows + row_of_span, mask=real, other=1.0)
        span_total = tl.load(parts + row_of_span[:, None] * D + d[None, :], mask=inside, other=0.0)
        row_of_span += rows
        peak, weight, total = _joined(peak, weight, total, span_peak, span_weight, span_total)
    tl.store(out + at, _mean(total, weight, out.dtype.element_ty), mask=inside)


def paged_attention(
    q_in: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    causal: bool = True,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.paged_attention`; pages are k (P, K, D, 16) and v (P, K, 16, D) for every type."""
    heads, D = check.pages(k_pages, v_pages, k_scale, v_scale, q_in)
    check.floats(q_in, "q")
    if q_in.dim() != 3 or q_in.shape[2] != D or q_in.shape[1] % heads or not q_in.shape[1]:
        raise ValueError(f"q of shape {list(q_in.shape)} does not fit {heads} key heads of {D}")
    if block_tables.dim() != 2:
        raise ValueError("block_tables must be (sequences, pages)")
    if window < 0:
        raise ValueError(f"window is {window}; 0 for none or a number of keys is wanted")
    if not causal:
        raise ValueError("on GPUs every token sees those up to itself; causal=True is wanted")
    if bias is not None:
        raise ValueError("on GPUs scores have no bias by distance")
    if sinks is not None:
        raise ValueError("on GPUs attention has no sinks")
    if soft_cap < 0:
        raise ValueError(f"soft_cap is {soft_cap}; 0 for none or a positive number is wanted")
    q = q_in.contiguous()
    out = torch.empty_like(q)
    tokens, query_heads, _ = q.shape
    page_count = len(k_pages)
    sequences, table_width = block_tables.shape
    check.vector(block_tables, sequences * table_width, "block_tables", q, torch.int32)
    check.vector(query_starts, sequences + 1, "query_starts", q, torch.int32)
    check.vector(context_lens, sequences, "context_lens", q, torch.int32)
    if not tokens or not sequences:
        return out
    group, block_d = query_heads // heads, max(16, triton.next_power_of_2(D))
    # By type and head size alone: tiles of another shape would round in another way.
    block_m, block_s = (64, 64) if block_d <= 128 else (32, 32) if block_d == 256 else (16, 32)
    if (
        k_pages.dtype == torch.float32
    ):  # no matrix unit takes it whole, and large tiles take minutes to compile
        block_m, block_s = 16, 32
    tiles = tokens * group // block_m + sequences
    spans = -(-table_width * PAGE // SPAN)
    sums = spans * tokens * query_heads * (D + 2)
    apart = spans > 1 and tiles * heads < PROGRAMS and sums <= MOST_SUMS
    parts = q.new_empty(spans * tokens * query_heads * D if apart else 0, dtype=torch.float32)
    part_sums = q.new_empty(2 * spans * tokens * query_heads if apart else 0, dtype=torch.float32)
    scaled = k_pages.dtype == torch.int8
    attention_kernel[(tiles, heads, spans if apart else 1)](
        q, k_pages, v_pages, k_scale if scaled else q, v_scale if scaled else q,
        block_tables, query_starts, context_lens, out, parts, part_sums,
        tokens, sequences, table_width, page_count, float(scale), float(soft_cap), window,
        HEADS=heads, GROUP=group, D=D, BLOCK_D=block_d, BLOCK_M=block_m, BLOCK_S=block_s, SPAN_KEYS=SPAN,
        NARROW=k_pages.dtype != torch.float32, SCALED=scaled, CAPPED=soft_cap > 0, APART=apart,
        num_warps=4 if block_d <= 64 else 8, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    if apart:
        rows, block_r = tokens * query_heads, 4
        join_kernel[(-(-rows // block_r),)](
            parts, part_sums, out, rows, spans,
            D=D, BLOCK_D=block_d, BLOCK_R=block_r, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
