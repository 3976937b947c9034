"""Attention over a sequence whose parts lie on the processes of a ring.

Keys and values travel; what each process's queries make of a part is merged by the logarithm of its sum of exponentials
(Liu et al., 2023; Dao, 2023). Backward, keys and values travel again, behind them the gradients they gather, which come
home after a full round. Scores are never kept: a fused kernel computes a part, or tiles of a few queries do, where it
knows no window or soft cap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from torchwright.train.model.attention import Scores, masked_scores, visible
from torchwright.train.parallel.zigzag import pieces

TILE = 128
"""Queries whose scores exist at once where no fused kernel computes them."""
FUSED_HEAD = 256
"""The largest head dimension of the GPU's kernel, which takes multiples of 8."""


def ring_attention(
    q_BHTD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    scores: Scores,
    group: str,
    documents_BS: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention (B, H, T, D) over the named group, each process of which holds the tokens of `zigzag.places`.

    `documents_BS` says of each token of the whole rows where its document begins; no query sees further back.
    """
    rules = (scores.scale, scores.window, scores.soft_cap)
    return _forward(q_BHTD, k_BKTD, v_BKTD, documents_BS, scores.sinks_H, *rules, group)[0]


def _compute(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    soft_cap: float,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and, in float32 or better, the logarithm of each query's sum of exponentials (B, H, T), its sink's too."""
    scores = Scores(scale=scale, window=window, soft_cap=soft_cap)
    ring = _Ring(group, q.shape[2], documents)
    exact = torch.promote_types(q.dtype, torch.float32)
    out = _by_token(q).to(exact).zero_()
    log_total = q.new_full(q.shape[:3], float("-inf"), dtype=exact)
    travelling = torch.stack([k, v])
    for step in range(ring.ways):
        coming = ring.start_pass(travelling) if step + 1 < ring.ways else None
        for block in ring.blocks(step, _tiled(q, scores), scores.window):
            part_k, part_v = travelling[..., block.keys, :]
            part, log_part = _attend(q[:, :, block.rows], part_k, part_v, block, scores)
            _merge(out[:, :, block.rows], log_total[:, :, block.rows], part, log_part)
        if coming is not None:
            travelling = coming.finish()
    if sinks is not None:
        # One more key for every query, whose value is zero: so backward is what it is without sinks.
        _merge(out, log_total, torch.zeros_like(out), sinks.to(exact)[:, None].expand_as(log_total))
    return out.to(q.dtype), log_total


def _compute_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log_total: torch.Tensor,
    documents: torch.Tensor | None,
    scale: float,
    window: int,
    soft_cap: float,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = Scores(scale=scale, window=window, soft_cap=soft_cap)
    ring = _Ring(group, q.shape[2], documents)
    d_q = q.new_zeros(q.shape, dtype=log_total.dtype)
    travelling, gathering = torch.stack([k, v]), None
    for step in range(ring.ways):
        coming = ring.start_pass(travelling) if step + 1 < ring.ways else None
        own = travelling.new_zeros(travelling.shape, dtype=log_total.dtype)
        for block in ring.blocks(step, _tiled(q, scores), scores.window):
            rows, keys = block.rows, block.keys
            part_k, part_v = travelling[..., keys, :]
            d_rows, *d_keys = _attend_backward(
                d_out[:, :, rows],
                q[:, :, rows],
                out[:, :, rows],
                log_total[:, :, rows],
                part_k,
                part_v,
                block,
                scores,
            )
            d_q[:, :, rows] += d_rows
            own[..., keys, :] += torch.stack(d_keys)
        if gathering is not None:
            own += gathering.finish()
        # Gradients go the whole round, keys and values stop where nobody needs them any more.
        gathering = ring.start_pass(own)
        if coming is not None:
            travelling = coming.finish()
    assert gathering is not None
    d_k, d_v = gathering.finish().to(k.dtype)
    return d_q.to(q.dtype), d_k.clone(), d_v.clone()


# Each is one operator to whoever looks from above: the compiler goes around it, and selective recomputation keeps what
# it gave instead of sending keys again.
_forward = torch.library.custom_op("torchwright_train::ring_attention", _compute, mutates_args=())
_backward = torch.library.custom_op(
    "torchwright_train::ring_attention_backward", _compute_backward, mutates_args=()
)


@_forward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    exact = torch.promote_types(q.dtype, torch.float32)
    return _by_token(q), q.new_empty(q.shape[:3], dtype=exact)


@_backward.register_fake
def _(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_rest: Any
) -> tuple[torch.Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _by_token(q: torch.Tensor) -> torch.Tensor:
    """(B, H, T, D) with a token's heads side by side, as the projection behind attention reads them."""
    B, H, T, D = q.shape
    return q.new_empty(B, T, H, D).transpose(1, 2)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *parts, documents, sinks = inputs[:5]
    ctx.save_for_backward(*parts, *output, documents, sinks)
    ctx.rest = inputs[5:]


def _gradients(ctx: Any, d_out: torch.Tensor, _d_log_total: torch.Tensor | None) -> tuple[Any, ...]:
    *saved, sinks = ctx.saved_tensors
    d_sinks = None if sinks is None else _sink_gradient(d_out, saved[3], saved[4], sinks)
    found = _backward(d_out.contiguous(), *saved, *ctx.rest)
    return *found, None, d_sinks, *(None for _ in ctx.rest)


def _sink_gradient(
    d_out: torch.Tensor, out: torch.Tensor, log_total: torch.Tensor, sinks_H: torch.Tensor
) -> torch.Tensor:
    """Return the gradient (H,) of a key's score whose value is zero."""
    share_BHT = (sinks_H.to(log_total.dtype)[:, None] - log_total).exp()
    given_BHT = (d_out * out).sum(-1, dtype=log_total.dtype)
    return -(share_BHT * given_BHT).sum((0, 2)).to(sinks_H.dtype)


_forward.register_autograd(_gradients, setup_context=_keep)
INSIDE: dict[Any, Callable[..., Any]] = {
    torch.ops.torchwright_train.ring_attention.default: _compute,
    torch.ops.torchwright_train.ring_attention_backward.default: _compute_backward,
}
"""Operator → what it runs, for whoever counts what happens in it."""


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Some of this process's queries with some of the keys that are here, by their places in the parts."""

    rows: slice
    keys: slice
    causal: bool = False
    """Both are one stretch of the sequence; else every query comes behind every key, unless there is a `distance`."""
    distance: int | None = None
    """From the first key to the first query, where tiles look at each pair."""
    first_BQ: torch.Tensor | None = None
    """The first key of each query's document, counted from the first key here; before it where it is negative."""


class _Ring:
    """One process's place in the ring, and what it computes there with the part that came from `step` places back."""

    def __init__(self, group: str, length: int, documents: torch.Tensor | None) -> None:
        self.group = _resolve_process_group(group)  # pyright: ignore[reportArgumentType]  # its name, a string
        self.ways, self.rank, self.length = dist.get_world_size(self.group), dist.get_rank(self.group), length
        self.documents_BS = documents

    def blocks(self, step: int, tiled: bool, window: int) -> Iterator[_Block]:
        source = (self.rank - step) % self.ways
        if tiled or self.documents_BS is not None or 0 < window < self.ways * self.length:
            yield from self._tiles(source, window)
            return
        everything, first = slice(0, self.length), self.length - self.length // 2
        if source == self.rank:
            yield _Block(rows=everything, keys=everything, causal=True)
        elif source < self.rank:  # its front lies before all of ours, its back behind
            yield _Block(rows=everything, keys=slice(0, first))
        elif first < self.length:  # our back alone lies behind all of its part
            yield _Block(rows=slice(first, self.length), keys=everything)

    def _tiles(self, source: int, window: int) -> Iterator[_Block]:
        """A few queries with the keys that any of them sees; a query's own place first, so that it has seen a key."""
        ours, theirs = (pieces(self.ways * self.length, part, self.ways) for part in (self.rank, source))
        for row, queries in zip((0, len(ours[0])), ours, strict=True):
            for begin in range(0, len(queries), TILE):
                tile = queries[begin : begin + TILE]
                seen = max(0, tile.start - window + 1) if window else 0
                documents_BQ = None
                if self.documents_BS is not None:
                    documents_BQ = self.documents_BS[:, tile.start : tile.stop]
                    seen = max(seen, int(documents_BQ[:, 0].min()))
                for column, keys in zip((len(theirs[0]), 0), reversed(theirs), strict=True):
                    earliest = max(keys.start, seen)
                    latest = min(keys.stop, tile.stop)
                    if earliest < latest:
                        yield _Block(
                            rows=slice(row + begin, row + begin + len(tile)),
                            keys=slice(column + earliest - keys.start, column + latest - keys.start),
                            distance=tile.start - earliest,
                            first_BQ=None if documents_BQ is None else documents_BQ - earliest,
                        )

    def start_pass(self, tensor: torch.Tensor) -> _Pass:
        """Send `tensor` to the next process while the previous one's comes."""
        return _Pass(tensor, self)


class _Pass:
    def __init__(self, tensor: torch.Tensor, ring: _Ring) -> None:
        self.sent, self.received = tensor, torch.empty_like(tensor)
        following, previous = ((ring.rank + way) % ring.ways for way in (1, -1))
        operations = [
            dist.P2POp(dist.isend, self.sent, group=ring.group, group_peer=following),
            dist.P2POp(dist.irecv, self.received, group=ring.group, group_peer=previous),
        ]
        self.works = dist.batch_isend_irecv(operations)

    def finish(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received


def _tiled(q: torch.Tensor, scores: Scores) -> bool:
    """Check for the lack of a fused kernel for whole parts: none supports soft caps, nor float32 on a GPU."""
    wide = q.shape[-1] % 8 != 0 or q.shape[-1] > FUSED_HEAD or q.dtype.itemsize > 2
    return bool(scores.soft_cap) or (q.is_cuda and wide)


def _merge(out: torch.Tensor, log_total: torch.Tensor, part: torch.Tensor, log_part: torch.Tensor) -> None:
    """Add a part, normalized by its own sum, to an output that is normalized by its own; both in place."""
    new = torch.logaddexp(log_total, log_part)
    out.mul_((log_total - new).exp_()[..., None]).addcmul_((log_part - new).exp_()[..., None], part)
    log_total.copy_(new)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: _Block, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output over these keys alone, and the logarithm of their sum of exponentials."""
    if block.distance is not None:
        score = _tile_scores(q, k, block, scores)
        log_total = score.logsumexp(-1)
        # A query that sees nothing here has a sum of 0, and of −∞ nothing may be subtracted.
        weight = (score - log_total.clamp_min(torch.finfo(score.dtype).min)[..., None]).exp()
        return (weight.to(v.dtype) @ v[:, :, None]).flatten(1, 2), log_total.flatten(1, 2)
    aten: Any = torch.ops.aten
    if q.is_cuda:
        found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, block.causal, scale=scores.scale)
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, block.causal, scale=scores.scale
        )
    return found[0], found[1]


def _attend_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    log_total: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block: _Block,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """These keys' share of the gradients of q, k and v; `out` and `log_total` are those over all keys."""
    if block.distance is not None:
        return _tile_backward(d_out, q, out, log_total, k, v, block, scores)
    aten: Any = torch.ops.aten
    known = (d_out, q, k, v, out, log_total.contiguous())
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *known, 0.0, block.causal, scale=scores.scale
        )
    nothing_random = [torch.zeros(size, dtype=torch.uint64, device=q.device) for size in (2, ())]
    return aten._scaled_dot_product_flash_attention_backward(
        *known, None, None, q.shape[2], k.shape[2], 0.0, block.causal, *nothing_random, scale=scores.scale
    )


def _tile_scores(q: torch.Tensor, k: torch.Tensor, block: _Block, scores: Scores) -> torch.Tensor:
    """(B, K, H/K, Q, S) in float32 or better."""
    assert block.distance is not None
    place_Q, place_S = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    hidden = ~visible(place_Q + block.distance, place_S, scores.window, block.first_BQ)
    if hidden.ndim == 3:
        hidden = hidden[:, None, None]
    return masked_scores(q, k, hidden, scores).to(torch.promote_types(q.dtype, torch.float32))


def _tile_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    log_total: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block: _Block,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same in operators of their own (Dao et al., 2022, algorithm 4)."""
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    d_out, q_groups, out = (x.unflatten(1, groups) for x in (d_out, q, out))
    score = _tile_scores(q, k, block, scores)
    weight = (score - log_total.unflatten(1, groups)[..., None]).exp()
    delta = (d_out * out).sum(-1, keepdim=True, dtype=score.dtype)
    d_score = weight * ((d_out @ v[:, :, None].transpose(-1, -2)).to(score.dtype) - delta)
    if scores.soft_cap:
        capped = score.masked_fill(score == float("-inf"), 0) / scores.soft_cap
        d_score = d_score * (1 - capped.square())
    d_score = (d_score * scores.scale).to(q.dtype)
    return (
        (d_score @ k[:, :, None]).flatten(1, 2),
        (d_score.transpose(-1, -2) @ q_groups).sum(2),
        (weight.to(v.dtype).transpose(-1, -2) @ d_out).sum(2),
    )
