"""Attention over a sequence whose parts lie on the processes of a ring.

Keys and values travel; each process folds every part into an online softmax (Liu et al., 2023; Milakov & Gimelshein,
2018). Backward, they travel again with the gradients they gather, and come home after a full round.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torchwright.train.model.attention import Scores, masked_scores, visible


@torch.compiler.disable
def ring_attention(
    q_BHTD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    scores: Scores,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Causal attention (B, H, T, D); process r of the group holds tokens r·T to (r + 1)·T of each sequence."""
    return _Ring.apply(q_BHTD, k_BKTD, v_BKTD, scores, group)  # type: ignore[return-value]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: Scores,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        B, H, T, D = q.shape
        K, place = k.shape[1], _Place(group, T, q.device)
        exact = torch.promote_types(q.dtype, torch.float32)
        largest = q.new_full((B, K, H // K, T, 1), float("-inf"), dtype=exact)
        total = torch.zeros_like(largest)
        out = q.new_zeros((B, K, H // K, T, D), dtype=exact)
        travelling = torch.stack([k, v])
        for step in range(place.ways):
            coming = place.start_pass(travelling) if step + 1 < place.ways else None
            hidden = place.hidden(step, scores.window)
            if hidden is not None:
                part_k, part_v = travelling
                score = masked_scores(q, part_k, hidden, scores).to(exact)
                # A row that sees nothing here keeps its maximum; of −∞ to −∞ nothing may be subtracted.
                new_largest = torch.maximum(largest, score.amax(-1, keepdim=True))
                safe = new_largest.masked_fill(new_largest == float("-inf"), 0)
                weight, fade = (score - safe).exp(), (largest - safe).exp()
                total = total * fade + weight.sum(-1, keepdim=True)
                out = out * fade + weight.to(v.dtype) @ part_v[:, :, None]
                largest = new_largest
            if coming is not None:
                travelling = coming.finish()
        out = (out / total).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, largest + total.log())
        ctx.scores, ctx.group = scores, group
        return out.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, log_total = ctx.saved_tensors
        scores: Scores = ctx.scores
        B, H, T, D = q.shape
        K, place = k.shape[1], _Place(ctx.group, T, q.device)
        exact = log_total.dtype
        d_out = gradients[0].reshape(B, K, H // K, T, D)
        delta = (d_out * out).sum(-1, keepdim=True, dtype=exact)
        grouped_q = q.reshape(B, K, H // K, T, D)
        d_q = torch.zeros_like(grouped_q, dtype=exact)
        travelling = torch.stack([k, v])
        gathered = torch.zeros_like(travelling, dtype=exact)
        for step in range(place.ways):
            hidden = place.hidden(step, scores.window)
            if hidden is not None:
                part_k, part_v = travelling
                score = masked_scores(q, part_k, hidden, scores).to(exact)
                weight = (score - log_total).exp()
                d_score = weight * ((d_out @ part_v[:, :, None].transpose(-1, -2)).to(exact) - delta)
                if scores.soft_cap:
                    capped = score.masked_fill(hidden, 0) / scores.soft_cap
                    d_score = d_score * (1 - capped.square())
                d_score = (d_score * scores.scale).to(q.dtype)
                d_q += d_score @ part_k[:, :, None]
                gathered[0] += (d_score.transpose(-1, -2) @ grouped_q).sum(2)
                gathered[1] += (weight.to(v.dtype).transpose(-1, -2) @ d_out).sum(2)
            # Gradients go the whole round, keys and values stop where nobody needs them any more.
            with_keys = step + 1 < place.ways
            coming = [place.start_pass(gathered), *([place.start_pass(travelling)] if with_keys else [])]
            gathered = coming[0].finish()
            if with_keys:
                travelling = coming[1].finish()
        d_k, d_v = gathered.to(k.dtype)
        return d_q.reshape(B, H, T, D).to(q.dtype), d_k, d_v, None, None


class _Place:
    """One process's place in the ring."""

    def __init__(self, group: dist.ProcessGroup, length: int, device: torch.device) -> None:
        self.group, self.length, self.device = group, length, device
        self.ways, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def hidden(self, step: int, window: int) -> torch.Tensor | None:
        """(T, T): which keys of the part that is here at `step` no query sees; None where that is all of them."""
        source = (self.rank - step) % self.ways
        # The nearest pair is this part's first query and that part's last key.
        nearest = (self.rank - source - 1) * self.length + 1
        if source > self.rank or (window and source < self.rank and nearest >= window):
            return None
        place = torch.arange(self.length, device=self.device)
        return ~visible(place + self.rank * self.length, place + source * self.length, window)

    def start_pass(self, tensor: torch.Tensor) -> _Pass:
        """Send `tensor` to the next process while the previous one's comes."""
        return _Pass(tensor, self)


class _Pass:
    def __init__(self, tensor: torch.Tensor, place: _Place) -> None:
        self.sent = tensor.contiguous()
        self.received = torch.empty_like(self.sent)
        following, previous = ((place.rank + way) % place.ways for way in (1, -1))
        operations = [
            dist.P2POp(dist.isend, self.sent, group=place.group, group_peer=following),
            dist.P2POp(dist.irecv, self.received, group=place.group, group_peer=previous),
        ]
        self.works = dist.batch_isend_irecv(operations)

    def finish(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received
