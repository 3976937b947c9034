"""Expert parallelism: each process holds some experts, and tokens travel to theirs and back (`dispatch.py`).

The experts' matrices may be divided over tp besides, like those of a feed-forward block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torchwright.train.model.blocks import ComputeExperts, ExpertBiases, Experts
from torchwright.train.parallel.dispatch import Dispatch, Transport

FEED_FORWARD = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1, "down_bias": None}
"""The dimension of the feed-forward features, which tp divides; None for a bias that it copies."""


def apply_expert_parallel(experts: Experts, mesh: DeviceMesh, transport: Transport | None = None) -> None:
    """Divide experts over the mesh's dimension `ep` and their features over `tp`, as far as it has these.

    `transport` takes tokens to experts in other processes of `ep`.
    """
    assert mesh.mesh_dim_names is not None
    axes = [axis for axis in ("ep", "tp") if axis in mesh.mesh_dim_names and mesh[axis].size() > 1]
    if not axes:
        return
    part, count = mesh[tuple(axes)], len(experts.gate)
    for name, features in FEED_FORWARD.items():
        full = getattr(experts, name)
        if full is None:
            continue
        divided = Replicate() if features is None else Shard(features)
        placements = [Shard(0) if axis == "ep" else divided for axis in axes]
        # Every process holds the same weights already (or none, on the meta device): nothing is sent.
        local = distribute_tensor(full, part, placements, src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(local))
    experts.compute = ParallelExperts(experts.compute, mesh["tp"] if "tp" in axes else None)
    if "ep" in axes:
        assert transport is not None
        experts.exchange = Dispatch(transport, count // mesh["ep"].size())


class ParallelExperts:
    """`compute` on this process's part of the parameters, which may be divided over `tp` as well."""

    def __init__(self, compute: ComputeExperts, tp: DeviceMesh | None) -> None:
        self.compute, self.tp = compute, tp

    def __call__(
        self,
        x_SE: torch.Tensor,
        counts_X: torch.Tensor,
        gate_XFE: torch.Tensor,
        up_XFE: torch.Tensor,
        down_XEF: torch.Tensor,
        activation: str,
        biases: ExpertBiases | None = None,
    ) -> torch.Tensor:
        gate, up, down = (_local(matrix) for matrix in (gate_XFE, up_XFE, down_XEF))
        local = (
            None if biases is None else ExpertBiases(*(_local(bias) for bias in biases if bias is not None))
        )
        if self.tp is None:
            return self.compute(x_SE, counts_X, gate, up, down, activation, local)
        # The last bias is added once, to the sum.
        first = None if local is None else local._replace(down_XE=None)
        x_SE = _CopyIn.apply(x_SE, self.tp.get_group())  # pyright: ignore[reportAssignmentType]
        out_SE = self.compute(x_SE, counts_X, gate, up, down, activation, first)
        out_SE = _SumOut.apply(out_SE, self.tp.get_group())  # pyright: ignore[reportAssignmentType]
        if local is None or local.down_XE is None:
            return out_SE
        return out_SE + local.down_XE.to(out_SE.dtype).repeat_interleave(counts_X, 0)


class _CopyIn(torch.autograd.Function):
    """A replicated tensor for a divided computation: its gradient is the sum of the parts'."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return wait_tensor(all_reduce(gradients[0].contiguous(), "sum", ctx.group)), None


class _SumOut(torch.autograd.Function):
    """The sum of every process's tensor, the same everywhere, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return wait_tensor(all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], None


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
