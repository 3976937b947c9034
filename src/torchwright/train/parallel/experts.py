"""Expert parallelism: each process holds some experts, and tokens travel to theirs and back.

The experts' matrices may be divided over tp besides, like those of a feed-forward block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce, all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchwright.train.model.blocks import ComputeExperts, Experts

FEED_FORWARD = {"gate": 1, "up": 1, "down": 2}
"""The dimension of the feed-forward features, which tp divides."""


def apply_expert_parallel(experts: Experts, mesh: DeviceMesh) -> None:
    """Divide experts over the mesh's dimension `ep` and their features over `tp`, as far as it has these."""
    assert mesh.mesh_dim_names is not None
    axes = [axis for axis in ("ep", "tp") if axis in mesh.mesh_dim_names and mesh[axis].size() > 1]
    if not axes:
        return
    part = mesh[tuple(axes)]
    for name, features in FEED_FORWARD.items():
        placements = [Shard(0 if axis == "ep" else features) for axis in axes]
        full = getattr(experts, name)
        # Every process holds the same weights already (or none, on the meta device): nothing is sent.
        local = distribute_tensor(full, part, placements, src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(local))
    experts.compute = ParallelExperts(
        experts.compute, mesh["ep"] if "ep" in axes else None, mesh["tp"] if "tp" in axes else None
    )


class ParallelExperts:
    """`compute` on parameters divided over `ep` and `tp`, either of which may be None."""

    def __init__(self, compute: ComputeExperts, ep: DeviceMesh | None, tp: DeviceMesh | None) -> None:
        self.compute, self.ep, self.tp = compute, ep, tp

    def __call__(
        self,
        x_SE: torch.Tensor,
        counts_X: torch.Tensor,
        gate_XFE: torch.Tensor,
        up_XFE: torch.Tensor,
        down_XEF: torch.Tensor,
        activation: str,
    ) -> torch.Tensor:
        matrices = _local(gate_XFE), _local(up_XFE), _local(down_XEF), activation

        def compute(x_RE: torch.Tensor, counts_X: torch.Tensor) -> torch.Tensor:
            return self.compute(x_RE, counts_X, *matrices)

        if self.tp is not None:
            x_SE = _CopyIn.apply(x_SE, self.tp.get_group())  # pyright: ignore[reportAssignmentType]
        if self.ep is not None:
            out_SE = exchange(x_SE, counts_X, compute, self.ep)
        else:
            out_SE = compute(x_SE, counts_X)
        if self.tp is not None:
            out_SE = _SumOut.apply(out_SE, self.tp.get_group())  # pyright: ignore[reportAssignmentType]
        return out_SE


def exchange(
    x_SE: torch.Tensor,
    counts_X: torch.Tensor,
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ep: DeviceMesh,
) -> torch.Tensor:
    """Rows to the processes of their experts, `compute`d there, and back to where they came from."""
    group, ways = ep.get_group(), ep.size()
    arriving = wait_tensor(all_to_all_single(counts_X, None, None, group)).view(ways, -1)
    sent, received = counts_X.view(ways, -1).sum(1).tolist(), arriving.sum(1).tolist()
    x_RE = wait_tensor(all_to_all_single(x_SE, received, sent, group))
    # They arrive ordered by process, then expert; the matrices want them by expert.
    local_X = torch.arange(arriving.shape[1], device=x_SE.device).repeat(ways)
    order_R = local_X.repeat_interleave(arriving.flatten()).argsort(stable=True)
    out_RE = compute(x_RE[order_R], arriving.sum(0))
    out_RE = torch.empty_like(out_RE).index_copy(0, order_R, out_RE)
    return wait_tensor(all_to_all_single(out_RE, sent, received, group))


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
