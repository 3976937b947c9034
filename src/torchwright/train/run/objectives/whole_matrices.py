"""Parameters as the whole matrices that Adafactor and Muon take, whatever the layout shares out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchwright.train.model.fill import fill, whole


class WholeMatrices:
    """A parameter as whole matrices: itself, or one for each expert.

    A process that holds the parameter whole moves the parameter's own memory, as all others do. Of one that is shared
    out, a single process of its mesh, the owner, keeps a copy with the optimizer's state and moves it; then all take
    their parts. So state and work are divided among processes, a matrix each.
    """

    def __init__(self, parameter: nn.Parameter, owner: int) -> None:
        """`owner` counts the processes of the parameter's mesh."""
        self.parameter = parameter
        self._owner: tuple[int, ...] | None = None
        """The owner's coordinate, None where every process holds the parameter."""
        self._copy: torch.Tensor | None = None
        if not is_shared_out(parameter):
            self.matrices = _matrices(_local(parameter.detach()))
            return
        mesh = parameter.device_mesh
        self._owner = tuple(int(place) for place in (mesh.mesh == mesh.mesh.flatten()[owner]).nonzero()[0])
        if tuple(mesh.get_coordinate() or ()) == self._owner:
            self._copy = torch.empty(
                parameter.shape, dtype=parameter.dtype, device=parameter.to_local().device
            )
        self.matrices = [] if self._copy is None else _matrices(self._copy)

    def begin(self) -> None:
        """Give the matrices their gradients, of a parameter that has one; collective where it is shared out."""
        gradient = self.parameter.grad
        assert gradient is not None
        if self._owner is None:
            gradients = _matrices(_local(gradient))
        else:
            full, weight = whole(gradient), whole(self.parameter.detach())
            if self._copy is None:
                return
            self._copy.copy_(weight)
            gradients = _matrices(full)
        for matrix, part in zip(self.matrices, gradients, strict=True):
            matrix.grad = part

    def end(self) -> None:
        """Take from the owner what it has made of the matrices."""
        if self._owner is None:
            return
        assert isinstance(self.parameter, DTensor)
        local, mesh = self.parameter.to_local(), self.parameter.device_mesh
        full = torch.empty(self.parameter.shape, dtype=local.dtype, device=local.device)
        full = full if self._copy is None else self._copy
        # One dimension of the mesh after the other: then all processes that differ from the owner in it have it too.
        for dimension, place in enumerate(self._owner):
            dist.broadcast(full, group=mesh.get_group(dimension), group_src=place)
        fill(self.parameter, full)


def whole_matrices(parameters: Iterable[nn.Parameter]) -> list[WholeMatrices]:
    """Return parameters as whole matrices; owners have about as much work as each other, on every mesh."""
    work: dict[tuple[int, ...], list[int]] = {}
    found = []
    for parameter in parameters:
        owner = 0
        shared: torch.Tensor = parameter
        if is_shared_out(shared):
            ranks = tuple(shared.device_mesh.mesh.flatten().tolist())
            of_mesh = work.setdefault(ranks, [0] * len(ranks))
            owner = of_mesh.index(min(of_mesh))
            # Muon's products: as many numbers as the matrix has, times its short side.
            of_mesh[owner] += parameter.numel() * (min(parameter.shape[-2:]) if parameter.dim() > 1 else 1)
        found.append(WholeMatrices(parameter, owner))
    return found


def is_shared_out(parameter: torch.Tensor) -> TypeGuard[DTensor]:
    """Check whether no process holds the parameter whole."""
    return isinstance(parameter, DTensor) and any(
        parameter.device_mesh.size(dimension) > 1 and not placement.is_replicate()
        for dimension, placement in enumerate(parameter.placements)
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _matrices(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor itself, or a matrix for each expert."""
    return [tensor] if tensor.dim() < 3 else list(tensor.unbind())
