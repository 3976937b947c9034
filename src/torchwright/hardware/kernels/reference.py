"""Reference of every kernel of the decoder in plain PyTorch, and the fallback without compiled kernels.

Axes: T new tokens of all sequences together, B sequences, H query heads, K key-value heads, D head size, R rotated
dimensions, E model size, F feed-forward size, P pages, S keys of one sequence. Sums are taken in float32, or in
float64 where the input has it.

Keys and values lie in pages of 16 tokens, in the order in which vector kernels read them:

    float32, float64   k (P, K, D, 16)        v (P, K, 16, D)
    bfloat16           k (P, K, D/2, 16, 2)   v (P, K, 8, D, 2)    pairs of dimensions, pairs of keys innermost
    int8               k (P, K, D, 16)        v (P, K, 16, D)      with float32 scales (P, K, 16) beside each

For GPUs, whose tiles need no pairs, bfloat16 pages are laid out as float32 ones: theirs have four dimensions, not five.
A slot is page · 16 + the token's place in the page.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch.nn import functional as F

PAGE = 16
"""Tokens of a page."""
PAIRED = 5
"""Dimensions of pages of bfloat16 pairs."""
SMALLEST_STEP = 1e-38
"""Rows whose step would not be beyond it are quantized to zeros: its inverse has no float32."""
LEVELS_8, LEVELS_16 = 127, 254 * 127 + 126
LEVELS = {8: LEVELS_8, 16: LEVELS_16}
"""Integers on each side of zero. Those of 16 bits are two digits to the base 254, each within ±127."""
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""The constants of `clamped_swiglu`, which gpt-oss's configurations repeat."""
QUERY_BLOCK = 128
"""Queries that meet all keys at once, so that the scores of a long prompt fit in memory."""


def add_low_rank(
    y_TN: torch.Tensor, x_TK: torch.Tensor, rows_M: torch.Tensor, a_RK: torch.Tensor, b_NR: torch.Tensor
) -> None:
    """Add B A x to these rows (int64) of y, in place; A x is rounded to A's type, and the sum to y's."""
    middle_MR = F.linear(x_TK[rows_M].to(a_RK.dtype), a_RK)
    y_TN[rows_M] = (y_TN[rows_M].float() + F.linear(middle_MR.float(), b_NR.float())).to(y_TN.dtype)


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis, in x's dtype (Zhang and Sennrich, 2019).

    `weight_E` is the whole factor: Gemma's "1 +" is already in it.
    """
    x = _wide(x_TE)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * weight_E).to(x_TE.dtype)


def add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), both in x's dtype; the norm reads the sum as it is stored."""
    total = x_TE + residual_TE
    return rms_norm(total, weight_E, eps), total


def gated(gate_up_TF: torch.Tensor, kind: str) -> torch.Tensor:
    """activation(gate) · up (T, F) of the two halves of (T, 2F), gate first.

    `kind` is silu, gelu_tanh or clamped_swiglu, which is gpt-oss's: gate · sigmoid(1.702 · gate) · (up + 1), gate at
    most 7 and up within ±7.
    """
    gate, up = _wide(gate_up_TF).chunk(2, dim=-1)
    if kind == "clamped_swiglu":
        return clamped_swiglu(gate, up).to(gate_up_TF.dtype)
    active = F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")
    return (active * up).to(gate_up_TF.dtype)


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate · sigmoid(1.702 · gate) · (up + 1), gate at most 7 and up within ±7 (OpenAI, gpt-oss)."""
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


def activate(x: torch.Tensor, kind: str) -> torch.Tensor:
    """activation(x) in x's dtype; `kind` is relu, gelu, gelu_tanh, silu or sigmoid."""
    return ACTIVATIONS[kind](_wide(x)).to(x.dtype)


def choose(
    score_TX: torch.Tensor,
    bias_X: torch.Tensor | None,
    chosen: int,
    sigmoid: bool,
    groups: int,
    chosen_groups: int,
    ranked: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return all experts' shares (T, X), each token's chosen experts (T, C), the best first, and their shares (T, C).

    Shares are the softmax or the sigmoid of a router's scores in float32 or better. A bias changes the ranks alone.
    Experts lie in groups, of which a token goes to those with the largest sums of the `ranked` best ranks
    (DeepSeek-AI, 2024).
    """
    wide = torch.promote_types(score_TX.dtype, torch.float32)
    share_TX = score_TX.to(wide).sigmoid() if sigmoid else score_TX.softmax(-1, dtype=wide)
    rank_TX = share_TX if bias_X is None else share_TX + bias_X
    if chosen_groups < groups:
        rank_TGM = rank_TX.unflatten(-1, (groups, -1))
        group_TG = rank_TGM.topk(ranked, dim=-1).values.sum(-1)
        kept_TG = group_TG.topk(chosen_groups, dim=-1).indices
        hidden_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, kept_TG, False)
        rank_TX = rank_TGM.masked_fill(hidden_TG[..., None], -torch.inf).flatten(-2)
    expert_TC = rank_TX.topk(chosen, dim=-1).indices
    return share_TX, expert_TC, share_TX.gather(-1, expert_TC)


def route(
    score_TX: torch.Tensor,
    bias_X: torch.Tensor | None,
    weight_X: torch.Tensor | None,
    chosen: int,
    sigmoid: bool,
    groups: int,
    chosen_groups: int,
    ranked: int,
    normalize: bool,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts (T, C) as `choose` does, and the factors (T, C) of their outputs.

    A factor is the expert's share, of the chosen ones' sum where it is to `normalize`, times `factor` and the expert's
    own weight. The kernels take the first of equal ranks.
    """
    _, expert_TC, share_TC = choose(score_TX, bias_X, chosen, sigmoid, groups, chosen_groups, ranked)
    if normalize:
        share_TC = share_TC / share_TC.sum(-1, keepdim=True)
    if factor != 1:
        share_TC = share_TC * factor
    return expert_TC, share_TC if weight_X is None else share_TC * weight_X[expert_TC]


def rope_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Norm and rotate queries and keys (T, (H + 2K) · D), write keys and values into their slots; queries (T, H, D).

    `cos` and `sin` (rows, R/2) are float32 and read at row `positions_T`; the first R dimensions of a head turn,
    dimension i with i + R/2, and R may be 0. int8 pages take round(x · 127 / max|x|) for each token and head, halves to
    even, and the scale max|x| / 127. Without key-value heads nothing is written.
    """
    qkv_THD = _wide(qkv).unflatten(1, (heads + 2 * kv_heads, qkv.shape[1] // (heads + 2 * kv_heads)))
    q, k, v = qkv_THD.split([heads, kv_heads, kv_heads], dim=1)
    if q_norm_D is not None:
        q = rms_norm(q, q_norm_D, eps)
    if k_norm_D is not None:
        k = rms_norm(k, k_norm_D, eps)
    cos_T, sin_T = cos[positions_T][:, None], sin[positions_T][:, None]
    if kv_heads:
        _store_keys(_rotate(k, cos_T, sin_T), slots_T, k_pages, k_scale)
        _store_values(v, slots_T, v_pages, v_scale)
    return _rotate(q, cos_T, sin_T).to(qkv.dtype)


def paged_attention(
    q_THD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    block_tables_BP: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens_B: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    causal: bool = True,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention (T, H, D) of each sequence's queries over its own pages.

    Rows `query_starts[b]` to `query_starts[b + 1]` are the last tokens of sequence b, whose `context_lens_B[b]` keys
    lie in pages `block_tables_BP[b]`. A query at position p sees keys at positions in (p − `window`, p], or all up to p
    when `window` is 0; where attention is not `causal`, all of the context behind p as well. `soft_cap` c > 0 turns a
    score s into c · tanh(s / c). Query head h reads key-value head h // (H / K). `bias` (H, 2L) in float32, L a
    multiple of 64 and no context longer, is added to the scores of its head: column L + d for a key d places behind
    its query. `sinks` (H,) are scores beside the keys' in each head's softmax, with values of zero (Xiao et al., 2023;
    gpt-oss).
    """
    out_THD = torch.empty_like(q_THD)
    starts, contexts = query_starts.tolist(), context_lens_B.tolist()
    group = q_THD.shape[1] // k_pages.shape[1]
    for sequence, context in enumerate(contexts):
        first, last = starts[sequence], starts[sequence + 1]
        pages = block_tables_BP[sequence, : -(-context // PAGE)].long()
        k_KSD = load_keys(k_pages, k_scale, pages)[:, :context]
        v_KSD = _load_values(v_pages, v_scale, pages)[:, :context]
        position_S = torch.arange(context, device=q_THD.device)
        for start in range(first, last, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, last)
            # (T, H, D) → (K, G · T, D): the query heads of one key-value head are rows of one product.
            q = _wide(q_THD[start:stop]).unflatten(1, (-1, group)).permute(1, 2, 0, 3)
            score_KGTS = torch.einsum("kgtd,ksd->kgts", q, k_KSD.to(q.dtype)) * scale
            if soft_cap:
                score_KGTS = torch.tanh(score_KGTS / soft_cap) * soft_cap
            if bias is not None:
                query_T = position_S[context - last + start : context - last + stop]
                column_TS = bias.shape[1] // 2 + position_S - query_T[:, None]
                score_KGTS = score_KGTS + bias[:, column_TS].unflatten(0, (-1, group))
            if causal or window:
                place_T = torch.arange(context - last + start, context - last + stop, device=q_THD.device)
                distance_TS = place_T[:, None] - position_S
                hidden_TS = (distance_TS < 0) & causal
                if window:
                    hidden_TS |= distance_TS >= window
                score_KGTS = score_KGTS.masked_fill(hidden_TS, -torch.inf)
            if sinks is None:
                weight_KGTS = score_KGTS.softmax(-1)
            else:
                sink_KGT1 = sinks.to(score_KGTS).view(-1, group, 1, 1).expand(*score_KGTS.shape[:3], 1)
                weight_KGTS = torch.cat([score_KGTS, sink_KGT1], -1).softmax(-1)[..., :-1]
            out = torch.einsum("kgts,ksd->kgtd", weight_KGTS, v_KSD.to(q.dtype))
            out_THD[start:stop] = out.permute(2, 0, 1, 3).flatten(1, 2).to(out_THD.dtype)
    return out_THD


def varlen_attention(
    qkv_NF: torch.Tensor,
    cos_NR: torch.Tensor,
    sin_NR: torch.Tensor,
    starts: torch.Tensor,
    heads: int,
    scale: float,
) -> torch.Tensor:
    """Attention (N, H · D) of each sequence's tokens to all of the same sequence; sequence b has rows `starts[b]` on.

    `qkv_NF` (N, 3 · H · D) holds queries, keys and values; the first two are turned by their token's angles, whose
    cosines and sines are (N, D/2) in float32. `starts` (int32) begins with 0 and ends with N.
    """
    q_HND, k_HND, v_HND = turned(qkv_NF, cos_NR, sin_NR, heads)
    found: list[torch.Tensor] = []
    for start, stop in pairwise(starts.tolist()):
        q, k, v = (_wide(x_HND[:, start:stop]) for x_HND in (q_HND, k_HND, v_HND))
        weight_HTS = torch.softmax(torch.einsum("htd,hsd->hts", q, k) * scale, -1)
        found.append(torch.einsum("hts,hsd->thd", weight_HTS, v).flatten(1))
    return torch.cat([qkv_NF.new_empty(0, qkv_NF.shape[1] // 3), *found]).to(qkv_NF.dtype)


def turned(
    qkv_NF: torch.Tensor, cos_NR: torch.Tensor, sin_NR: torch.Tensor, heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values (H, N, D) in the input's type, the first two with their rotary embedding."""
    q_NHD, k_NHD, v_NHD = qkv_NF.unflatten(1, (3, heads, -1)).unbind(1)
    angles = cos_NR[:, None], sin_NR[:, None]
    q, k = (_rotate(_wide(x_NHD), *angles).to(qkv_NF.dtype) for x_NHD in (q_NHD, k_NHD))
    return q.transpose(0, 1), k.transpose(0, 1), v_NHD.transpose(0, 1)


def steps(peak: torch.Tensor, levels: int = LEVELS_8) -> torch.Tensor:
    """levels / peak, and 0 where that overflows; one division: torch's `127 / peak` multiplies by a rounded inverse."""
    return torch.where(peak > levels * SMALLEST_STEP, torch.full_like(peak, levels) / peak, 0)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rotate(x_THD: torch.Tensor, cos_T: torch.Tensor, sin_T: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of half-split pairs (Su et al., 2021)."""
    half = cos_T.shape[-1]
    x1, x2, rest = x_THD.split([half, half, x_THD.shape[-1] - 2 * half], dim=-1)
    return torch.cat([x1 * cos_T - x2 * sin_T, x2 * cos_T + x1 * sin_T, rest], dim=-1)


def _store_keys(
    k_TKD: torch.Tensor, slots_T: torch.Tensor, pages: torch.Tensor, scale: torch.Tensor | None
) -> None:
    page, place = slots_T // PAGE, slots_T % PAGE
    if pages.dim() == PAIRED:
        pages[page, :, :, place] = k_TKD.unflatten(-1, (-1, 2)).to(pages.dtype)
        return
    if scale is not None:
        k_TKD, scale[page, :, place] = _quantize(k_TKD)
    pages[page, :, :, place] = k_TKD.to(pages.dtype)


def _store_values(
    v_TKD: torch.Tensor, slots_T: torch.Tensor, pages: torch.Tensor, scale: torch.Tensor | None
) -> None:
    page, place = slots_T // PAGE, slots_T % PAGE
    if pages.dim() == PAIRED:
        pages[page, :, place // 2, :, place % 2] = v_TKD.to(pages.dtype)
        return
    if scale is not None:
        v_TKD, scale[page, :, place] = _quantize(v_TKD)
    pages[page, :, place] = v_TKD.to(pages.dtype)


def _quantize(x_TKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers in ±127 and their scale (T, K)."""
    largest_TK = x_TKD.abs().amax(-1)
    return (x_TKD * steps(largest_TK)[..., None]).round().clamp(-127, 127), (largest_TK / 127).float()


def load_keys(pages: torch.Tensor, scale: torch.Tensor | None, table_P: torch.Tensor) -> torch.Tensor:
    """Keys (K, S, D) of the pages of a sequence."""
    chosen = pages[table_P]
    if pages.dim() == PAIRED:
        k_KSD = chosen.permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)
    else:
        k_KSD = chosen.permute(1, 0, 3, 2).flatten(1, 2)
    return _dequantize(k_KSD, scale, table_P)


def _load_values(pages: torch.Tensor, scale: torch.Tensor | None, table_P: torch.Tensor) -> torch.Tensor:
    chosen = pages[table_P]
    if pages.dim() == PAIRED:
        v_KSD = chosen.permute(1, 0, 2, 4, 3).flatten(1, 3)
    else:
        v_KSD = chosen.permute(1, 0, 2, 3).flatten(1, 2)
    return _dequantize(v_KSD, scale, table_P)


def _dequantize(x_KSD: torch.Tensor, scale: torch.Tensor | None, table_P: torch.Tensor) -> torch.Tensor:
    if scale is None:
        return x_KSD
    return x_KSD.float() * scale[table_P].transpose(0, 1).flatten(1)[..., None]
