"""The gradient's norm over every axis of a layout, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate


@torch.no_grad()
def grad_norm(parameters: Iterable[torch.Tensor], stages: int = 1) -> torch.Tensor:
    """Return the 2-norm of all gradients as if one process held them, whatever mix of shards and copies they are.

    A shard counts once, however many processes hold a copy. Every process of the run must call it; with
    pipeline parallelism over `stages` processes each has other parameters.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    exact = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = torch.stack(torch._foreach_norm(_local(gradients), dtype=exact))  # pyright: ignore[reportPrivateImportUsage]
    copies = torch.tensor([world / stages / _shards(gradient) for gradient in gradients], device=norms.device)
    total = (norms.square() / copies).sum()
    if world > 1:
        dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[torch.Tensor], largest: float, stages: int = 1) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most `largest`; returns the norm before.

    Nothing waits for the host: where the norm is smaller, gradients are multiplied by 1.
    """
    parameters = list(parameters)
    norm = grad_norm(parameters, stages)
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(_local(gradients), factor)  # pyright: ignore[reportPrivateImportUsage]
    return norm


def by_mesh(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Parameters grouped by the mesh they lie on: an optimizer's fused steps take tensors of one mesh at a time."""
    groups: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(
            parameter
        )
    return list(groups.values())


def _local(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _shards(tensor: torch.Tensor) -> int:
    """Into how many different parts the tensor is divided."""
    if not isinstance(tensor, DTensor):
        return 1
    count = 1
    for place, placement in enumerate(tensor.placements):
        assert not placement.is_partial(), "a gradient's sum is still pending"
        if not isinstance(placement, Replicate):
            count *= tensor.device_mesh.size(place)
    return count
