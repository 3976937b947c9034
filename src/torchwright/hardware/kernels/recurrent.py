"""Reference of the kernels of recurrent layers, which keep a state of each sequence, in plain PyTorch.

Axes as in `reference.py`, and: C channels, W width of a convolution, S slots of states, N copies. A recurrence has G
heads of queries and keys of size M, and H heads of values of size D. States are float32.

All kernels take the same five arguments after their own: the states of all slots, which are written; `query_starts`
(B + 1,) int32, sequence b's tokens being rows `query_starts[b]` to `query_starts[b + 1]`; `slots_B`, each sequence's
own; `mark_rows_N` in ascending order and `mark_slots_N`: after a row its sequence's state is copied into a slot. All
but the starts are int64. No slot occurs twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

KEY_EPS = 1e-6
"""Added to a key's and a query's sum of squares (Yang et al., 2024, as their kernels have it)."""


def short_conv(
    x_TC: torch.Tensor,
    weight_WC: torch.Tensor,
    bias_C: torch.Tensor | None,
    state: torch.Tensor,
    query_starts: torch.Tensor,
    slots_B: torch.Tensor,
    mark_rows_N: torch.Tensor,
    mark_slots_N: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    """Causal convolution (T, C) of each channel with its weights (W, C), then `silu` where it is asked for.

    A state (S, W - 1, C) holds the last inputs, the oldest first.
    """
    out_TC = torch.empty_like(x_TC)
    past = len(weight_WC) - 1
    for slot, first, last, marks in _sequences(query_starts, slots_B, mark_rows_N, mark_slots_N):
        line_LC = torch.cat([state[slot].to(_wide(x_TC)), x_TC[first:last].to(_wide(x_TC))])
        y_TC = F.conv1d(line_LC.t()[None], weight_WC.to(line_LC).t()[:, None], groups=x_TC.shape[1])[0].t()
        if bias_C is not None:
            y_TC = y_TC + bias_C
        out_TC[first:last] = (F.silu(y_TC) if silu else y_TC).to(x_TC.dtype)
        for row, copy in [*marks, (last - 1, slot)]:
            done = row + 1 - first
            state[copy] = line_LC[done : done + past].float()
    return out_TC


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    rate_H: torch.Tensor,
    shift_H: torch.Tensor,
    state: torch.Tensor,
    query_starts: torch.Tensor,
    slots_B: torch.Tensor,
    mark_rows_N: torch.Tensor,
    mark_slots_N: torch.Tensor,
    key_heads: int,
) -> torch.Tensor:
    """Gated delta rule (Yang et al., 2024): out (T, H · D) of queries and keys (T, G · M) and values (T, H · D).

    A token's state (M, D) of a head is decay · S + key ⊗ gain · (value − key · decay · S). Its output is query · state;
    decay is exp(−rate · softplus(a + shift)), gain is sigmoid(b). Keys and queries are scaled to length one, queries
    also by 1 / √M. Head h of the values reads head h // (H / G) of the keys. States are (S, H, M, D).
    """
    decay_TH = torch.exp(-rate_H * F.softplus(a_TH.to(_wide(v)) + shift_H))
    gain_TH = b_TH.to(_wide(v)).sigmoid()
    q_TGM, k_TGM = (_unit(x.to(_wide(v)).unflatten(-1, (key_heads, -1))) for x in (q, k))
    q_TGM = q_TGM * q_TGM.shape[-1] ** -0.5
    rows = (query_starts, slots_B, mark_rows_N, mark_slots_N)
    return _recur(q_TGM, k_TGM, v, decay_TH, gain_TH, state, rows, corrects=True).to(v.dtype)


def selective_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a_TH: torch.Tensor,
    rate_H: torch.Tensor,
    shift_H: torch.Tensor,
    skip_H: torch.Tensor,
    state: torch.Tensor,
    query_starts: torch.Tensor,
    slots_B: torch.Tensor,
    mark_rows_N: torch.Tensor,
    mark_slots_N: torch.Tensor,
    key_heads: int,
) -> torch.Tensor:
    """Mamba-2 (Dao and Gu, 2024): out (T, H · D) of C and B, here queries and keys (T, G · M), and values (T, H · D).

    A token's state (M, D) of a head is exp(−rate · step) · S + key ⊗ step · value, where step is softplus(a + shift).
    Its output is query · state + skip · value. States are (S, H, M, D).
    """
    step_TH = F.softplus(a_TH.to(_wide(v)) + shift_H)
    q_TGM, k_TGM = (x.to(_wide(v)).unflatten(-1, (key_heads, -1)) for x in (q, k))
    rows = (query_starts, slots_B, mark_rows_N, mark_slots_N)
    out = _recur(q_TGM, k_TGM, v, torch.exp(-rate_H * step_TH), step_TH, state, rows, corrects=False)
    skipped_THD = v.to(_wide(v)).unflatten(-1, (len(skip_H), -1)) * skip_H[:, None]
    return (out + skipped_THD.flatten(1)).to(v.dtype)


def gated_norm(
    x_TF: torch.Tensor, gate_TF: torch.Tensor, weight_HD: torch.Tensor, eps: float, gate_first: bool
) -> torch.Tensor:
    """rms_norm of each of H parts of D · silu(gate), the gate after the norm or before it; in x's dtype."""
    x, gate = (part.to(_wide(x_TF)).unflatten(-1, weight_HD.shape) for part in (x_TF, gate_TF))
    x = x * F.silu(gate) if gate_first else x
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_HD
    return (y if gate_first else y * F.silu(gate)).flatten(1).to(x_TF.dtype)


def _recur(
    q_TGM: torch.Tensor,
    k_TGM: torch.Tensor,
    v: torch.Tensor,
    decay_TH: torch.Tensor,
    gain_TH: torch.Tensor,
    state: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    corrects: bool,
) -> torch.Tensor:
    """Both recurrences, a token after the other, in float32 or better; `corrects` is the delta rule."""
    heads, size = state.shape[1], state.shape[-1]
    each = heads // q_TGM.shape[1]
    q_THM, k_THM = (x.repeat_interleave(each, dim=1)[..., None] for x in (q_TGM, k_TGM))
    v_THD = v.to(q_TGM).unflatten(-1, (heads, size))
    out = torch.empty_like(v_THD)
    for slot, first, last, marks in _sequences(*rows):
        now_HMD, copies = state[slot].to(q_TGM), dict(marks)
        for row in range(first, last):
            now_HMD = now_HMD * decay_TH[row, :, None, None]
            change_HD = v_THD[row]
            if corrects:
                change_HD = change_HD - (now_HMD * k_THM[row]).sum(1)
            now_HMD = now_HMD + k_THM[row] * (gain_TH[row, :, None] * change_HD)[:, None]
            out[row] = (now_HMD * q_THM[row]).sum(1)
            if row in copies:
                state[copies[row]] = now_HMD.float()
        state[slot] = now_HMD.float()
    return out.flatten(1)


def _sequences(
    query_starts: torch.Tensor, slots_B: torch.Tensor, mark_rows_N: torch.Tensor, mark_slots_N: torch.Tensor
) -> Iterator[tuple[int, int, int, list[tuple[int, int]]]]:
    """(slot, first row, row behind the last, (row, slot) of each copy) of each sequence that has rows."""
    starts, marks = query_starts.tolist(), list(zip(mark_rows_N.tolist(), mark_slots_N.tolist(), strict=True))
    for sequence, slot in enumerate(slots_B.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        if first < last:
            yield slot, first, last, [mark for mark in marks if first <= mark[0] < last]


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + KEY_EPS)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
