"""One interface for sending tokens to experts in other processes, with two implementations.

The layout is DeepEP's (DeepSeek-AI, 2025): a token travels once to each process that holds any of its experts, with
their indices there (-1 for experts elsewhere) and their weights. The experts' results are weighted and summed where
they are computed, and summed over processes where the token came from.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal, Protocol

import torch
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

from torchwright.train.layout import LayoutError
from torchwright.train.model.blocks import Arranged, count_choices

TransportKind = Literal["all_to_all", "deep_ep"]


class Transport(Protocol):
    """The transport of tokens. Both calls are differentiable, and every process of the group makes them."""

    def send(
        self, x_TE: torch.Tensor, expert_TC: torch.Tensor, share_TC: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        """The tokens that arrive here (R, E), their experts by this process's numbers (R, C), their weights (R, C).

        Last comes what `send_back` needs to know of the journey.
        """
        ...

    def send_back(self, out_RE: torch.Tensor, journey: Any) -> torch.Tensor:
        """Return for each token that was sent (T, E) the sum of its processes' results."""
        ...


class Dispatch:
    """`Exchange` of a mixture whose experts are spread over processes, `own` of them in this one."""

    def __init__(self, transport: Transport, own: int) -> None:
        self.transport, self.own = transport, own

    def dispatch(self, x_TE: torch.Tensor, expert_TC: torch.Tensor, share_TC: torch.Tensor) -> Arranged:
        x_RE, expert_RC, share_RC, journey = self.transport.send(x_TE, expert_TC, share_TC)
        expert_P = expert_RC.flatten()
        pair_S = (expert_P >= 0).nonzero().squeeze(1)
        pair_S = pair_S[expert_P[pair_S].argsort(stable=True)]
        row_S = pair_S // expert_RC.shape[1]
        handle = row_S, share_RC.flatten()[pair_S], len(x_RE), journey
        return x_RE[row_S], count_choices(expert_P[pair_S], self.own), handle

    def combine(self, out_SE: torch.Tensor, handle: Any) -> torch.Tensor:
        row_S, share_S, rows, journey = handle
        out_RE = summed(out_SE.to(_wide(out_SE)) * share_S[:, None], row_S, rows)
        return self.transport.send_back(out_RE.to(out_SE.dtype), journey)


class AllToAll:
    """By torch.distributed's all-to-all, on any device."""

    def __init__(self, group: ProcessGroup, own: int) -> None:
        self.group, self.own = group, own

    def send(
        self, x_TE: torch.Tensor, expert_TC: torch.Tensor, share_TC: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        is_for_TW = torch.zeros(len(x_TE), self.group.size(), dtype=torch.bool, device=x_TE.device)
        is_for_TW.scatter_(1, expert_TC // self.own, True)
        process_S, token_S = is_for_TW.T.nonzero().unbind(1)
        sending_W = is_for_TW.sum(0)
        arriving_W = wait_tensor(all_to_all_single(sending_W, None, None, self.group))
        sent, received = sending_W.tolist(), arriving_W.tolist()
        expert_SC = expert_TC[token_S] - self.own * process_S[:, None]
        elsewhere_SC = (expert_SC < 0) | (expert_SC >= self.own)
        expert_RC, share_RC, x_RE = (
            self._exchange(part, received, sent)
            for part in (
                expert_SC.masked_fill(elsewhere_SC, -1),
                share_TC[token_S].masked_fill(elsewhere_SC, 0),
                x_TE[token_S],
            )
        )
        return x_RE, expert_RC, share_RC, (token_S, sent, received, len(x_TE))

    def send_back(self, out_RE: torch.Tensor, journey: Any) -> torch.Tensor:
        token_S, sent, received, tokens = journey
        out_SE = self._exchange(out_RE, sent, received)
        return summed(out_SE.to(_wide(out_SE)), token_S, tokens).to(out_RE.dtype)

    def _exchange(self, x: torch.Tensor, arriving: list[int], leaving: list[int]) -> torch.Tensor:
        return wait_tensor(all_to_all_single(x, arriving, leaving, self.group))


class DeepEP:
    """By DeepEP's `Buffer` (its normal kernels): bfloat16, between NVIDIA cards that reach each other."""

    def __init__(self, buffer: Any, experts: int) -> None:
        self.buffer, self.experts = buffer, experts

    def send(
        self, x_TE: torch.Tensor, expert_TC: torch.Tensor, share_TC: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        if x_TE.dtype != torch.bfloat16:
            raise LayoutError(
                "experts.dispatch 'deep_ep' sends tokens in bfloat16",
                found=f"tokens in {str(x_TE.dtype).removeprefix('torch.')}",
                next="set precision = 'bf16', or leave dispatch out",
            )
        arrived: Any = _Sent.apply(x_TE, share_TC.float(), expert_TC, self.buffer, self.experts)
        return arrived

    def send_back(self, out_RE: torch.Tensor, journey: Any) -> torch.Tensor:
        back: Any = _SentBack.apply(out_RE, journey, self.buffer)
        return back


class _Sent(torch.autograd.Function):
    """Backward, gradients are combined: each token's are the sum of those of its copies."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TE: torch.Tensor,
        share_TC: torch.Tensor,
        expert_TC: torch.Tensor,
        buffer: Any,
        experts: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        for_process, for_node, for_expert, is_for, _ = buffer.get_dispatch_layout(expert_TC, experts)
        x_RE, expert_RC, share_RC, _, handle, _ = buffer.dispatch(
            x_TE.contiguous(),
            topk_idx=expert_TC,
            topk_weights=share_TC.contiguous(),
            num_tokens_per_rank=for_process,
            num_tokens_per_rdma_rank=for_node,
            is_token_in_rank=is_for,
            num_tokens_per_expert=for_expert,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(expert_RC)
        return x_RE, expert_RC, share_RC, handle

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_RE, _, share_RC, _ = gradients
        x_TE, share_TC, _ = ctx.buffer.combine(
            x_RE.contiguous(), ctx.handle, topk_weights=share_RC.contiguous()
        )
        return x_TE, share_TC, None, None, None


class _SentBack(torch.autograd.Function):
    """Backward, gradients are dispatched as the tokens were."""

    @staticmethod
    def forward(ctx: Any, out_RE: torch.Tensor, handle: Any, buffer: Any) -> torch.Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(out_RE.contiguous(), handle)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.buffer.dispatch(gradients[0].contiguous(), handle=ctx.handle)[0], None, None


def make_transport(
    way: TransportKind, group: ProcessGroup, experts: int, width: int, device: str
) -> Transport:
    """Return the dispatcher of tokens of `width` values to `experts` experts, spread evenly over `group`.

    Raises `LayoutError` for DeepEP without a card or its package. Collective.
    """
    if way == "all_to_all":
        return AllToAll(group, experts // group.size())
    asked, otherwise = "experts.dispatch 'deep_ep' is not to be had here", "leave dispatch out"
    if device != "cuda":
        raise LayoutError(
            asked, found=f"a run on {device}", allowed="NVIDIA cards that DeepEP supports", next=otherwise
        )
    try:
        package = importlib.import_module("deep_ep")
    except ImportError as error:
        raise LayoutError(
            asked,
            found=f"the package deep_ep does not import: {error}",
            next=f"build it as github.com/deepseek-ai/DeepEP describes, or {otherwise}",
        ) from error
    return DeepEP(_make_buffer(package.Buffer, group, 2 * width), experts)


def _make_buffer(kind: Any, group: ProcessGroup, token_bytes: int) -> Any:
    """A buffer with the room that its own configurations for sending and for summing ask for."""
    ways = group.size()
    ways_of = (kind.get_dispatch_config(ways), kind.get_combine_config(ways))
    near, far = (
        max(getattr(config, f"get_{link}_buffer_size_hint")(token_bytes, ways) for config in ways_of)
        for link in ("nvl", "rdma")
    )
    return kind(group, near, far)


def summed(rows_SE: torch.Tensor, to_S: torch.Tensor, count: int) -> torch.Tensor:
    """(count, E): each row added to the place that it goes to."""
    return rows_SE.new_zeros(count, rows_SE.shape[1]).index_add(0, to_S, rows_SE)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
