"""The blocks of one layer: norm, attention, feed-forward block, mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F

from torchwright.hardware.kernels import norm
from torchwright.hardware.kernels.reference import ACTIVATIONS, clamped_swiglu
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.config import ExpertsConfig as ExpertsConfig
from torchwright.models.decoder.shared import route
from torchwright.train.model.attention import Attend, Scores, fused_attention
from torchwright.train.model.vector import Vector

RotaryAngles = tuple[torch.Tensor, torch.Tensor] | None
"""Cosines and sines, None where a layer does not rotate."""


class RMSNorm(nn.Module):
    """x / rms(x) · (weight + offset), computed in float32 or better."""

    def __init__(self, size: int, eps: float, offset: float) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if self.offset:
            weight = weight.to(torch.promote_types(x.dtype, torch.float32)) + self.offset
        if isinstance(x, DTensor) and isinstance(weight, DTensor) and not torch.compiler.is_compiling():
            return self._of_own_rows(x, weight)
        return norm.rms_norm(x, weight, self.eps)

    def _of_own_rows(self, x: DTensor, weight: DTensor) -> torch.Tensor:
        """Norm this process's rows: DTensor would run norms on a CPU operator by operator."""
        if any(place.is_shard(x.ndim - 1) or place.is_partial() for place in x.placements):
            return norm.rms_norm(x, weight, self.eps)
        # A weight's gradient is a sum over rows, and so over the processes that divide them.
        sums = [Replicate() if place.is_replicate() else Partial() for place in x.placements]
        out = norm.rms_norm(x.to_local(), weight.to_local(grad_placements=sums), self.eps)
        strides = make_contiguous_strides_for(x.shape)
        return DTensor.from_local(out, x.device_mesh, x.placements, shape=x.shape, stride=strides)


class Attention(nn.Module):
    """Grouped-query attention.

    How many heads there are is read from the projections' outputs, so that a part of the heads works as well.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        E, D, heads, kv_heads = config.model, config.head_dim, config.heads, config.kv_heads
        self.head_dim, self.clip, self.norm_kind = D, config.clip_qkv, config.qk_norm
        self.scores = Scores(
            scale=config.scale, window=config.windows[layer], soft_cap=config.attention_soft_cap
        )
        self.q = nn.Linear(E, heads * D, bias=config.qkv_bias)
        self.k = nn.Linear(E, kv_heads * D, bias=config.qkv_bias)
        self.v = nn.Linear(E, kv_heads * D, bias=config.qkv_bias)
        self.o = nn.Linear(heads * D, E, bias=config.o_bias)
        self.gate = nn.Linear(E, heads * D, bias=config.qkv_bias) if config.output_gate else None
        self.sinks = Vector(heads) if config.sinks else None
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm != "none":
            whole = config.qk_norm == "projection"
            self.q_norm = RMSNorm(D * (heads if whole else 1), config.eps, config.norm_offset)
            self.k_norm = RMSNorm(D * (kv_heads if whole else 1), config.eps, config.norm_offset)
        self.attend: Attend = fused_attention

    def forward(
        self, x_BTE: torch.Tensor, rotary_angles: RotaryAngles, documents_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, k, v = self.q(x_BTE), self.k(x_BTE), self.v(x_BTE)
        q, k = self._normed("projection", q, k)
        if self.clip is not None:
            q, k, v = (part.clamp(-self.clip, self.clip) for part in (q, k, v))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        q, k = self._normed("head", q, k)
        if rotary_angles is not None:
            q, k = rotate(q, *rotary_angles), rotate(k, *rotary_angles)
        q, k = self._normed("rotated", q, k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        scores = self.scores if self.sinks is None else self.scores.beside(self.sinks())
        out_BTF = self.attend(q, k, v, scores, documents_BS).transpose(1, 2).flatten(2)
        return self.o(out_BTF if self.gate is None else out_BTF * self.gate(x_BTE).sigmoid())

    def _normed(self, kind: str, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm queries and keys, if this is the place where the family does."""
        if self.norm_kind != kind:
            return q, k
        assert self.q_norm is not None
        assert self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)


class FeedForward(nn.Module):
    """down(activation(gate(x)) · up(x)), `hidden` features wide."""

    def __init__(self, config: DecoderConfig, hidden: int) -> None:
        super().__init__()
        E = config.model
        self.activation = config.activation
        self.gate = nn.Linear(E, hidden, bias=config.mlp_bias)
        self.up = nn.Linear(E, hidden, bias=config.mlp_bias)
        self.down = nn.Linear(hidden, E, bias=config.mlp_bias)

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        return self.down(gated(self.gate(x_BTE), self.up(x_BTE), self.activation))


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) · up; `clamped_swiglu` (gpt-oss) is clamped as `reference` says."""
    return clamped_swiglu(gate, up) if activation == "clamped_swiglu" else ACTIVATIONS[activation](gate) * up


class ExpertBiases(NamedTuple):
    """The biases of all experts' three matrices."""

    gate_XF: torch.Tensor
    up_XF: torch.Tensor
    down_XE: torch.Tensor | None
    """None where they are added elsewhere."""


class ComputeExperts(Protocol):
    """See `compute_experts`; low precision, then tensor parallelism put theirs around it."""

    def __call__(
        self,
        x_SE: torch.Tensor,
        counts_X: torch.Tensor,
        gate_XFE: torch.Tensor,
        up_XFE: torch.Tensor,
        down_XEF: torch.Tensor,
        activation: str,
        biases: ExpertBiases | None = None,
    ) -> torch.Tensor: ...


Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From rows (N, K) and a matrix (M, K) to their products (N, M)."""


def compute_experts(
    x_SE: torch.Tensor,
    counts_X: torch.Tensor,
    gate_XFE: torch.Tensor,
    up_XFE: torch.Tensor,
    down_XEF: torch.Tensor,
    activation: str,
    biases: ExpertBiases | None = None,
    linear: Linear = F.linear,
) -> torch.Tensor:
    """(S, E): the first `counts_X[0]` rows through expert 0, the next through expert 1, and so on.

    An expert without a row is computed all the same, on nothing, so that its gradient is zero and not missing: sharded
    parameters need a gradient on every process.
    """
    parts = []
    rows, offsets = x_SE.split(counts_X.tolist()), by_expert(biases, len(counts_X))
    experts = zip(rows, gate_XFE, up_XFE, down_XEF, offsets, strict=True)
    for x_NE, gate_FE, up_FE, down_EF, (gate_F, up_F, down_E) in experts:
        gate_NF, up_NF = biased(linear(x_NE, gate_FE), gate_F), biased(linear(x_NE, up_FE), up_F)
        parts.append(biased(linear(gated(gate_NF, up_NF, activation), down_EF), down_E))
    return torch.cat(parts)


def by_expert(biases: ExpertBiases | None, count: int) -> Iterable[tuple[torch.Tensor | None, ...]]:
    """Return each expert's biases of gate, up and down."""
    parts: Iterable[torch.Tensor | None] = (None, None, None) if biases is None else biases
    return zip(*((None,) * count if part is None else part.unbind() for part in parts), strict=True)


def biased(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Add a bias in the type of `y`: autocast leaves biases of parameters' own type alone."""
    return y if bias is None else y + bias.to(y.dtype)


Arranged = tuple[torch.Tensor, torch.Tensor, Any]
"""Rows in the order of their experts (S, E), how many each expert has (X,), and what it takes to put them back."""


class Exchange(Protocol):
    """Brings tokens to their experts, and what these made of them back."""

    def dispatch(self, x_TE: torch.Tensor, expert_TC: torch.Tensor, share_TC: torch.Tensor) -> Arranged:
        """The rows of the experts that this process computes, of tokens with C chosen experts each."""
        ...

    def combine(self, out_SE: torch.Tensor, handle: Any) -> torch.Tensor:
        """(T, E): what each token's experts gave, weighted and summed."""
        ...


class Here:
    """The exchange of a process that holds all `count` experts."""

    def __init__(self, count: int) -> None:
        self.count = count

    def dispatch(self, x_TE: torch.Tensor, expert_TC: torch.Tensor, share_TC: torch.Tensor) -> Arranged:
        # The (token, choice) pairs in the order of their experts.
        order_S = expert_TC.flatten().argsort(stable=True)
        rows_SE = x_TE[order_S // expert_TC.shape[1]]
        return rows_SE, count_choices(expert_TC, self.count), (order_S, share_TC)

    def combine(self, out_SE: torch.Tensor, handle: Any) -> torch.Tensor:
        order_S, share_TC = handle
        pair_SE = torch.empty_like(out_SE).index_copy(0, order_S, out_SE)
        return (pair_SE.unflatten(0, (-1, share_TC.shape[1])) * share_TC[..., None].to(out_SE.dtype)).sum(1)


def count_choices(experts: torch.Tensor, count: int) -> torch.Tensor:
    """(count,): how often each expert's number is there."""
    return experts.flatten().bincount(minlength=count)


class Experts(nn.Module):
    """The experts' matrices, one tensor for all of a kind, and biases if they have any."""

    gate_bias: nn.Parameter | None
    up_bias: nn.Parameter
    down_bias: nn.Parameter

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        X, F_, E = experts.count, experts.feed_forward, config.model
        self.activation = config.activation
        self.gate = nn.Parameter(torch.empty(X, F_, E))
        self.up = nn.Parameter(torch.empty(X, F_, E))
        self.down = nn.Parameter(torch.empty(X, E, F_))
        for part, size in (("gate", F_), ("up", F_), ("down", E)):
            bias = nn.Parameter(torch.empty(X, size)) if experts.linear_bias else None
            self.register_parameter(f"{part}_bias", bias)
        self.compute: ComputeExperts = compute_experts
        self.exchange: Exchange = Here(X)

    def forward(self, x_TE: torch.Tensor, expert_TC: torch.Tensor, share_TC: torch.Tensor) -> torch.Tensor:
        """(T, E): each token through its chosen experts, weighted by their shares."""
        x_SE, counts_X, handle = self.exchange.dispatch(x_TE, expert_TC, share_TC)
        biases = None
        if self.gate_bias is not None:
            biases = ExpertBiases(self.gate_bias, self.up_bias, self.down_bias)
        out_SE = self.compute(x_SE, counts_X, self.gate, self.up, self.down, self.activation, biases)
        return self.exchange.combine(out_SE, handle)


Observe = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(chosen shares, all shares, tokens of each expert) → chosen shares as they are; see `balance.py`."""


class MixtureOfExperts(nn.Module):
    """Each token's chosen experts, weighted by the router's shares, and a block that all tokens go through if any.

    A bias, where there is one, only chooses; a scale, where there is one, multiplies an expert's output.
    """

    bias: torch.Tensor | None

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.config, self.count, self.chosen = experts, experts.count, experts.chosen
        self.router = nn.Linear(config.model, experts.count, bias=experts.router_bias)
        self.experts = Experts(config, experts)
        self.shared = FeedForward(config, experts.shared) if experts.shared else None
        self.shared_gate = nn.Linear(config.model, 1, bias=False) if experts.shared_gate else None
        self.register_buffer("bias", torch.zeros(experts.count) if experts.bias else None)
        self.scale = Vector(experts.count) if experts.expert_scale else None
        self.observers: list[Observe] = []

    def forward(self, x_BTE: torch.Tensor, routed_BTE: torch.Tensor | None = None) -> torch.Tensor:
        """The router reads `routed_BTE`, or `x_BTE` if that is not given."""
        x_TE = x_BTE.flatten(0, -2)
        score_TX = self.router(x_TE if routed_BTE is None else routed_BTE.flatten(0, -2))
        share_TX, expert_TC, share_TC = route(score_TX, self.bias, self.config)
        if self.observers:
            counts_X = count_choices(expert_TC, self.count)
            if self.config.sigmoid:  # what balances experts takes shares that sum to 1
                share_TX = share_TX / share_TX.sum(-1, keepdim=True)
            for observe in self.observers:
                share_TC = observe(share_TC, share_TX, counts_X)
        if self.config.normalize:
            share_TC = share_TC / share_TC.sum(-1, keepdim=True)
        if self.config.scale != 1:
            share_TC = share_TC * self.config.scale
        if self.scale is not None:
            share_TC = share_TC * self.scale()[expert_TC].to(share_TC.dtype)
        out_BTE = self.experts(x_TE, expert_TC, share_TC).view_as(x_BTE)
        return out_BTE if self.shared is None else out_BTE + self._shared(self.shared, x_BTE)

    def _shared(self, block: FeedForward, x_BTE: torch.Tensor) -> torch.Tensor:
        out_BTE = block(x_BTE)
        return out_BTE if self.shared_gate is None else out_BTE * self.shared_gate(x_BTE).sigmoid()


def rotate(x_BTHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first R dimensions of each head, the first half of them with the second."""
    half = cos.shape[-1]
    cos, sin = (part[..., None, :].to(x_BTHD.dtype) for part in (cos, sin))
    first, second, rest = x_BTHD.split([half, half, x_BTHD.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
