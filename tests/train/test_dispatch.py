"""Tokens to experts in other processes and back, against every expert computed in one place, token by token."""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from runs import CONFIG, MIXTURE, make_run
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from torchwright.models.decoder.families import decoder_config
from torchwright.train.layout import LayoutError
from torchwright.train.model.blocks import Experts, Here
from torchwright.train.parallel.dispatch import AllToAll, DeepEP, Dispatch, make_transport
from torchwright.train.parallel.experts import apply_expert_parallel
from torchwright.train.prove.processes import on_processes
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.read import read_run

EXPERTS, TOKENS = 8, 9
CHOSEN = (1, 3)


def case(
    rank: int, chosen: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their experts and weights, and the gradient of what comes back; expert 5 has no token anywhere."""
    generator = torch.Generator().manual_seed(7 * rank + chosen)
    tokens = TOKENS + 2 * rank  # no two processes have as many
    x_TE = torch.randn(tokens, 64, generator=generator, dtype=torch.float64).to(dtype)
    score_TX = torch.randn(tokens, EXPERTS, generator=generator, dtype=torch.float64)
    score_TX[:, 5] = -9
    share_TC, expert_TC = score_TX.softmax(-1).topk(chosen)
    share_TC = share_TC.to(torch.promote_types(dtype, torch.float32))
    return (
        x_TE,
        expert_TC,
        share_TC,
        torch.randn(tokens, 64, generator=generator, dtype=torch.float64).to(dtype),
    )


def mixture(dtype: torch.dtype) -> Experts:
    config = decoder_config(CONFIG | MIXTURE | {"num_local_experts": EXPERTS}, "the test")
    assert config.experts is not None
    experts = Experts(config, config.experts).double()
    generator = torch.Generator().manual_seed(0)
    for matrix in experts.parameters():
        torch.nn.init.normal_(matrix, std=matrix.shape[-1] ** -0.5, generator=generator)
    return experts.to(dtype)


def slow(
    experts: Experts, x_TE: torch.Tensor, expert_TC: torch.Tensor, share_TC: torch.Tensor
) -> torch.Tensor:
    """The sum's own words: for each token and each of its choices."""
    rows = []
    for x_E, expert_C, share_C in zip(x_TE, expert_TC.tolist(), share_TC, strict=True):
        parts = [
            share * (experts.down[e] @ (F.silu(experts.gate[e] @ x_E) * (experts.up[e] @ x_E)))
            for e, share in zip(expert_C, share_C, strict=True)
        ]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


def errors(way: str, chosen: int, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors on this process of what comes back and of every gradient, with the experts spread."""
    rank, ways = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ways,), mesh_dim_names=("ep",))
    group, own = mesh.get_group(), EXPERTS // ways
    transport = AllToAll(group, own) if way == "all_to_all" else DeepEP(SlowBuffer(group), EXPERTS)
    experts, whole = mixture(dtype), mixture(dtype).double()
    apply_expert_parallel(experts, mesh, transport)
    x_TE, expert_TC, share_TC, gradient_TE = case(rank, chosen, dtype)
    x_TE.requires_grad_()
    share_TC.requires_grad_()
    out_TE = experts(x_TE, expert_TC, share_TC)
    out_TE.backward(gradient_TE)

    inputs = [case(other, chosen, dtype) for other in range(ways)]
    for other, (x, chosen_TC, share, gradient) in enumerate(inputs):
        x, share = x.double().requires_grad_(), share.double().requires_grad_()
        out = slow(whole, x, chosen_TC, share)
        out.backward(gradient.double())
        if other == rank:
            pairs = {"out": (out_TE, out), "x": (x_TE.grad, x.grad), "share": (share_TC.grad, share.grad)}
    for name, matrix in experts.named_parameters():
        part = whole.get_parameter(name).grad[rank * own : (rank + 1) * own]  # type: ignore[index]
        pairs[name] = matrix.grad.to_local(), part  # type: ignore[union-attr]
    return {
        name: float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())  # type: ignore[union-attr]
        for name, (found, wanted) in pairs.items()
    }


@pytest.mark.parametrize(
    ("chosen", "processes"),
    [
        pytest.param(*pair, marks=() if pair == (max(CHOSEN), 4) else pytest.mark.slow)
        for pair in itertools.product(CHOSEN, (2, 4))
    ],
)
def test_forward_and_gradients_are_those_of_one_process(processes: int, chosen: int) -> None:
    """In float64, to 1e-14 of each value's norm."""
    for found in on_processes(processes, errors, "all_to_all", chosen, torch.float64):
        assert found.keys() == {"out", "x", "share", "gate", "up", "down"}
        assert max(found.values()) < 1e-14, found


def test_a_token_travels_once_to_each_process() -> None:
    """Of 3 choices that lie in 2 processes, 2 copies are sent, with the weights of what is there alone."""
    for copies, choices, weight, wanted in on_processes(2, copies_sent):
        assert copies < choices
        assert weight == pytest.approx(wanted)


def copies_sent() -> tuple[int, int, float, float]:
    group, rank = dist.group.WORLD, dist.get_rank()
    x_TE, expert_TC, share_TC, _ = case(rank, 3, torch.float32)
    assert group is not None
    x_RE, expert_RC, share_RC, (token_S, *_) = AllToAll(group, 4).send(x_TE, expert_TC, share_TC)
    assert len(x_RE) == len(expert_RC) == len(share_RC)
    assert set(expert_RC.unique().tolist()) <= {-1, 0, 1, 2, 3}
    assert not share_RC[expert_RC < 0].any()
    held = share_RC.sum()
    wanted = (
        (share_TC * (expert_TC // 4 == 0)).sum() if rank == 0 else (share_TC * (expert_TC // 4 == 1)).sum()
    )
    other = case(1 - rank, 3, torch.float32)
    wanted = wanted + (other[2] * (other[1] // 4 == rank)).sum()
    return len(token_S), expert_TC.numel(), float(held), float(wanted)


def test_without_other_processes_rows_are_arranged_as_with_them() -> None:
    """A group of one gives what `Here` gives, to the bit, in float32."""
    assert on_processes(1, same_as_here) == [True]


def same_as_here() -> bool:
    x_TE, expert_TC, share_TC, _ = case(0, 3, torch.float32)
    assert dist.group.WORLD is not None
    spread = Dispatch(AllToAll(dist.group.WORLD, EXPERTS), EXPERTS)
    ours, theirs = (way.dispatch(x_TE, expert_TC, share_TC) for way in (spread, Here(EXPERTS)))
    return torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


class SlowBuffer:
    """DeepEP's `Buffer` as its README and buffer.py describe it, over gloo: each process tells everything to all."""

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.room = group, (num_nvl_bytes, num_rdma_bytes)

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        own = num_experts // self.group.size()
        is_for = torch.stack([(topk_idx // own == other).any(1) for other in range(self.group.size())], 1)
        per_expert = topk_idx.flatten().bincount(minlength=num_experts).int()
        return is_for.sum(0).int(), None, per_expert, is_for, None

    def dispatch(
        self,
        x: torch.Tensor,
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16
        here = dist.get_rank(self.group)
        if handle is not None:
            assert topk_idx is None
            _, is_for_here = handle
            told = self._tell(x)
            return torch.cat([rows[mask] for rows, mask in zip(told, is_for_here, strict=True)]), *[None] * 5
        assert topk_weights is not None
        assert topk_weights.dtype == torch.float32
        assert num_tokens_per_rank is not None
        assert num_tokens_per_expert is not None
        told = self._tell((x, topk_idx, topk_weights, is_token_in_rank))
        own = len(num_tokens_per_expert) // self.group.size()
        masks = [is_for[:, here] for *_, is_for in told]
        rows, experts, weights = (
            torch.cat([part[place][mask] for part, mask in zip(told, masks, strict=True)])
            for place in range(3)
        )
        local = experts - here * own
        elsewhere = (local < 0) | (local >= own)
        counts = local[~elsewhere].bincount(minlength=own).tolist()
        local, weights = local.masked_fill(elsewhere, -1), weights.masked_fill(elsewhere, 0)
        return rows, local, weights, counts, (is_token_in_rank, masks), None

    def combine(
        self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        assert x.dtype == torch.bfloat16
        return self._sum(x, handle), None if topk_weights is None else self._sum(topk_weights, handle), None

    def _sum(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        is_token_in_rank, masks = handle
        mine, total = dist.get_rank(self.group), torch.zeros(len(is_token_in_rank), rows.shape[1])
        for other, (theirs, told) in enumerate(self._tell((rows, [int(mask.sum()) for mask in masks]))):
            begin = sum(told[:mine])
            total[is_token_in_rank[:, other]] += theirs[begin : begin + told[mine]].float()
        return total.to(rows.dtype)

    def _tell(self, value: Any) -> list[Any]:
        told: list[Any] = [None] * self.group.size()
        dist.all_gather_object(told, value, self.group)
        return told


def test_deep_ep_is_called_as_its_interface_says() -> None:
    """A slow buffer of the same interface; bfloat16's rounding of rows and sums: 2% of each value's norm."""
    for found in on_processes(2, errors, "deep_ep", 3, torch.bfloat16):
        assert max(found.values()) < 2e-2, found


class _Room:
    def __init__(self, near: int, far: int) -> None:
        self.near, self.far = near, far

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return self.near * hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return self.far * hidden_bytes * ranks


class SizedBuffer(SlowBuffer):
    get_dispatch_config = staticmethod(lambda ranks: _Room(3, 5))
    get_combine_config = staticmethod(lambda ranks: _Room(4, 2))


def test_a_buffer_has_room_for_sending_and_for_summing() -> None:
    assert on_processes(2, made_rooms) == [(4 * 128 * 2, 5 * 128 * 2)] * 2


def made_rooms() -> tuple[int, int]:
    package = types.ModuleType("deep_ep")
    package.Buffer = SizedBuffer  # type: ignore[attr-defined]
    assert dist.group.WORLD is not None
    with patch.dict(sys.modules, deep_ep=package):
        made: Any = make_transport("deep_ep", dist.group.WORLD, EXPERTS, 64, "cuda")
    return made.buffer.room


def refusals() -> list[str]:
    told = []
    assert dist.group.WORLD is not None
    for device in ("cpu", "cuda"):
        with pytest.raises(LayoutError) as refused, patch.dict(sys.modules, deep_ep=None):
            make_transport("deep_ep", dist.group.WORLD, EXPERTS, 64, device)
        told.append(str(refused.value))
    x, experts, shares, _ = case(0, 3, torch.float32)
    with pytest.raises(LayoutError) as refused:
        DeepEP(None, EXPERTS).send(x, experts, shares)
    return [*told, str(refused.value)]


def test_where_deep_ep_is_not_to_be_had_it_is_refused() -> None:
    ((on_cpu, no_package, too_wide),) = on_processes(1, refusals)
    assert "a run on cpu" in on_cpu
    assert "leave dispatch out" in on_cpu
    assert "does not import" in no_package
    assert "github.com/deepseek-ai/DeepEP" in no_package
    assert "tokens in float32" in too_wide


@pytest.mark.parametrize(
    ("experts", "changes", "says"),
    [
        ({"dispatch": "deep_ep"}, {}, "none are there"),
        ({"dispatch": "deep_ep"}, {"layout": {"dp_shard": 2, "ep": 2}, "precision": "fp32"}, "in bfloat16"),
        ({}, {}, "give `balance` or `dispatch`"),
        ({"bias_rate": 0.1, "dispatch": "all_to_all"}, {}, "bias_rate is for"),
        ({"dispatch": "deepep"}, {}, "experts.dispatch"),
    ],
)
def test_a_dispatch_that_sends_nothing_is_refused(
    experts: dict[str, Any], changes: dict[str, Any], says: str, tmp_path: Any
) -> None:
    changes = {"precision": "bf16", "model": {"config": CONFIG | MIXTURE}, **changes}
    with pytest.raises(RunError, match=says):
        read_run(make_run(tmp_path, experts=experts, **changes))
