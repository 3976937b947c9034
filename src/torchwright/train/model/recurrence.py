"""Linear recurrences over whole sequences, chunk by chunk, and their gradients.

A token's state (M, D) of a head is decay · S + key ⊗ gain · change, and its output is query · state. The change is the
token's value (Mamba-2's state space dual; Dao and Gu, 2024), or what the decayed state is off from it (the gated delta
rule; Yang et al., 2024). The tokens of a chunk see each other through matrix products, and the chunks before them
through the state at the chunk's begin. `hardware/kernels/recurrent.py` has the same token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from torchwright.hardware.kernels.recurrent import KEY_EPS
from torchwright.train.mixer_shape import CHUNK, SEGMENT


def recurrence(
    q_BTGM: torch.Tensor,
    k_BTGM: torch.Tensor,
    v_BTHD: torch.Tensor,
    log_decay_BTH: torch.Tensor,
    gain_BTH: torch.Tensor,
    documents_BT: torch.Tensor | None = None,
    *,
    corrects: bool,
    chunk: int = CHUNK,
    segment: int = SEGMENT,
) -> torch.Tensor:
    """Outputs (B, T, H, D) in the type of the values; states are float32 or better, as decay and gain should be.

    Head h of the values reads head h // (H / G) of queries and keys. `corrects` is the delta rule, for which keys and
    queries are scaled to length one, and queries by 1 / √M. `documents_BT` says of each token where in the row its
    document begins, with an empty state. Tokens see each other in chunks of `chunk` tokens, and gradients are computed
    in segments of `segment` tokens, a multiple of `chunk`.
    """
    return _uncompiled(
        q_BTGM, k_BTGM, v_BTHD, log_decay_BTH, gain_BTH, documents_BT, corrects, chunk, segment
    )


def _compute(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    gain: torch.Tensor,
    documents: torch.Tensor | None,
    corrects: bool,
    chunk: int,
    segment: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and the states (N, B, H, M, D) at the begins of segments."""
    out, states = _empty(k, v, segment)
    state = torch.zeros_like(states[0])
    with torch.autocast(v.device.type, enabled=False):
        for number in range(len(states)):
            rows, begins = _rows(number, documents, segment)
            states[number] = state
            parts = [x[:, rows] for x in (q, k, v, log_decay, gain)]
            out[:, rows], state = _segment(parts, begins, state, corrects, chunk)
    return out, states


# One operator to whoever looks from above: selective recomputation keeps what it gave.
_operator = torch.library.custom_op("torchwright_train::recurrence", _compute, mutates_args=())


@_operator.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(k, v, rest[-1])


def _empty(k: torch.Tensor, v: torch.Tensor, segment: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for outputs and for states."""
    B, T, H, D = v.shape
    exact = torch.promote_types(v.dtype, torch.float32)
    states = v.new_empty(-(-T // segment), B, H, k.shape[-1], D, dtype=exact)
    return v.new_empty(v.shape), states


def _rows(number: int, documents_BT: torch.Tensor | None, segment: int) -> tuple[slice, torch.Tensor | None]:
    """A segment's tokens, and where their documents begin, counted from its first."""
    first = number * segment
    rows = slice(first, first + segment)
    return rows, None if documents_BT is None else documents_BT[:, rows] - first


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *parts, ctx.corrects, ctx.chunk, ctx.segment = inputs
    ctx.save_for_backward(*parts, output[1])


def _gradients(ctx: Any, d_out: torch.Tensor, _d_states: torch.Tensor | None) -> tuple[Any, ...]:
    """Segment by segment from the last: each is computed again, with what its last state owes those behind it."""
    *wholes, documents, states = ctx.saved_tensors
    found = [x.new_empty(x.shape) for x in wholes]
    d_state = torch.zeros_like(states[0])
    for number in reversed(range(len(states))):
        rows, begins = _rows(number, documents, ctx.segment)
        given = [x[:, rows].detach().requires_grad_() for x in wholes]
        state = states[number].detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(states.device.type, enabled=False):
            gives = _segment(given, begins, state, ctx.corrects, ctx.chunk)
        *parts, d_state = torch.autograd.grad(gives, (*given, state), (d_out[:, rows], d_state))
        for whole, part in zip(found, parts, strict=True):
            whole[:, rows] = part
    return *found, None, None, None, None


_operator.register_autograd(_gradients, setup_context=_keep)
INSIDE: dict[Any, Callable[..., Any]] = {torch.ops.torchwright_train.recurrence.default: _compute}
"""Operator → what it runs, for whoever counts what happens in it."""


def _call(*given: Any) -> torch.Tensor:
    return _operator(*given)[0]


# Its gradient asks autograd for those of segments, which the compiler does not follow.
_uncompiled: Any = torch.compiler.disable(_call)


def _segment(
    parts: Sequence[torch.Tensor],
    documents_BT: torch.Tensor | None,
    state_BHMD: torch.Tensor,
    corrects: bool,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of a segment that is entered with a state, and the state behind it.

    Axes of what is computed: B, N chunks, G heads of keys, R heads of values for each, Q tokens of a chunk.
    """
    q_BTGM, k_BTGM, v_BTHD, log_decay_BTH, gain_BTH = parts
    exact, (T, H), G = state_BHMD.dtype, v_BTHD.shape[1:3], k_BTGM.shape[2]
    chunk = min(chunk, T)

    def chunks(x_BTHD: torch.Tensor, heads: int) -> torch.Tensor:
        """(B, N, heads, H / heads, Q, D), zeros behind the last token: these change no state."""
        x_BTHD = F.pad(x_BTHD.to(exact), (0, 0, 0, 0, 0, -T % chunk))
        return x_BTHD.unflatten(1, (-1, chunk)).transpose(2, 3).unflatten(2, (heads, -1))

    q, k, v = chunks(q_BTGM, G), chunks(k_BTGM, G), chunks(v_BTHD, G)
    decayed, gain = (chunks(x[..., None], G) for x in (log_decay_BTH, gain_BTH))
    if corrects:
        q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    decayed = decayed.cumsum(-2)
    reach = Reach(chunk, documents_BT, v.shape[1], v.device)
    # From each token of a chunk to each before it, from the chunk's begin to each, and from each to the chunk's end.
    between_QQ = (decayed - decayed.mT).masked_fill(~reach.pairs, -torch.inf).exp()
    from_begin = decayed.exp() if reach.carried is None else decayed.exp() * reach.carried
    to_end = (decayed[..., -1:, :] - decayed).exp()
    to_end = to_end if reach.last is None else to_end * reach.last
    score_QQ, asks, brings = q @ k.mT * between_QQ, q * from_begin, (k * to_end).mT
    kept, state = from_begin[..., -1:, :], state_BHMD.unflatten(1, (G, H // G))
    change, known = gain * v, None
    if corrects:
        system_QQ = k @ k.mT * between_QQ * gain
        sides = torch.cat([change, gain * from_begin * k], -1)
        solved = torch.linalg.solve_triangular(system_QQ, sides, upper=False, unitriangular=True)
        change, known = solved.split([v.shape[-1], k.shape[-1]], -1)
    outs = []
    for n in range(v.shape[1]):
        changes = change[:, n] if known is None else change[:, n] - known[:, n] @ state
        outs.append(asks[:, n] @ state + score_QQ[:, n] @ changes)
        state = kept[:, n] * state + brings[:, n] @ changes
    out = torch.stack(outs, 1).flatten(2, 3).transpose(2, 3).flatten(1, 2)
    return out[:, :T].to(v_BTHD.dtype), state.flatten(1, 2)


class Reach:
    """Which tokens of a chunk share a document with which, as factors and masks of N chunks (B, N, 1, 1, Q, …)."""

    def __init__(
        self, chunk: int, documents_BT: torch.Tensor | None, chunks: int, device: torch.device
    ) -> None:
        self.pairs = torch.ones(chunk, chunk, dtype=torch.bool, device=device).tril()
        """A token reads another, itself included."""
        self.carried: torch.Tensor | None = None
        """A token reads the state at its chunk's begin; None where all do."""
        self.last: torch.Tensor | None = None
        """A token is in the document of its chunk's last one, which alone goes on; None where all are."""
        if documents_BT is None:
            return
        behind = chunks * chunk - documents_BT.shape[1]
        documents_BT = torch.cat([documents_BT, documents_BT[:, -1:].expand(-1, behind)], 1)
        begins = documents_BT.unflatten(1, (chunks, chunk))[:, :, None, None, :, None]
        first_N = chunk * torch.arange(chunks, device=device)
        self.pairs = self.pairs & (begins == begins.mT)
        self.carried = begins < first_N[:, None, None, None, None]
        self.last = begins == begins[..., -1:, :]


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + KEY_EPS)
