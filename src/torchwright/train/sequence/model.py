"""A model whose sequences are shared by the processes of a mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from torchwright.core.errors import first_line
from torchwright.train.sequence.report import RewriteReport, SequenceParallelError
from torchwright.train.sequence.rewrite import rewrite


def sequence_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence_dim: int = 1) -> SequenceParallel:
    """`model`, its graph rewritten so that each process of `mesh` computes its part of every sequence.

    Call what is returned as the model is called, with the same whole batch on every process; it returns the loss of
    the whole batch, and `backward` leaves whole gradients in the model's own parameters on every process. Axis
    `sequence_dim` of the first tensor is the sequence. Parameters and buffers are made those of the mesh's first
    process. Give each process another seed where there is dropout.

    After AutoSP (PyTorch and DeepSpeed, 2026) and Ulysses (Jacobs et al., 2023). Raises `SequenceParallelError` for a
    mesh of more than one axis, and at the first call of a shape for what cannot be captured or rewritten.
    """
    if mesh.ndim != 1:
        raise SequenceParallelError(
            "sequence_parallel takes a mesh of one axis",
            found=f"{mesh.ndim} axes, {mesh.mesh_dim_names}",
            next='pass one axis of it, as mesh["sequence"]',
        )
    return SequenceParallel(model, mesh, sequence_dim)


class SequenceParallel(nn.Module):
    """The result of `sequence_parallel`. `model` is the user's own, which `optimizer` and checkpoints may take."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, sequence_dim: int) -> None:
        super().__init__()
        self.model, self.sequence_dim = model, sequence_dim
        self.ways, self.group = mesh.size(), mesh.get_group()
        self._graphs: dict[Any, tuple[GraphModule, RewriteReport]] = {}
        self._last: RewriteReport | None = None
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), group=self.group, group_src=0)

    @property
    def report(self) -> RewriteReport:
        """The rewriting of the graph that ran last; print it."""
        if self._last is None:
            raise SequenceParallelError("nothing was rewritten yet", next="call the model once")
        return self._last

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The model's loss over the whole batch, the same on every process."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (self.model.training, spec, tuple(map(_signature, leaves)))
        if key not in self._graphs:
            self._graphs[key] = self._rewritten(args, kwargs, leaves)
        graph, self._last = self._graphs[key]
        return graph(*args, **kwargs)

    def _rewritten(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
    ) -> tuple[GraphModule, RewriteReport]:
        length = self._length(leaves)
        _check_same(leaves, self.group)
        graph, self._last = rewrite(
            _captured(self.model, args, kwargs), self.ways, length, self.group.group_name
        )
        self._last.check()
        return graph, self._last

    def _length(self, leaves: list[Any]) -> int:
        tensors = [
            leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim > self.sequence_dim
        ]
        if not tensors:
            raise SequenceParallelError(f"no input has an axis {self.sequence_dim}, the sequence's")
        length = tensors[0].shape[self.sequence_dim]
        if length % self.ways:
            raise SequenceParallelError(
                f"{self.ways} processes do not divide sequences of {length} tokens",
                next="pad them: attention_mask 0, labels -100",
            )
        return length


class _Loss(nn.Module):
    """The model, of whose output the loss is taken."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = self.model(*args, **kwargs)
        loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if loss is None:
            raise SequenceParallelError(
                "the model does not return its loss",
                found=type(output).__name__,
                allowed="a scalar, or an output with a scalar `loss`",
                next="pass labels, or wrap the model in a module that computes the loss",
            )
        return loss


def _captured(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphModule:
    """The graph of the loss in ATen operators, over the model's own parameters."""
    # A tensor passed twice would be one input: the graph must hold for other tensors of these shapes.
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.empty_like, (args, kwargs))
    devices = {parameter.device.type for parameter in model.parameters()} or {"cpu"}
    try:
        # Autocast acts on the rewritten graph, when it runs.
        with torch.autocast(devices.pop(), enabled=False):
            return torch.export.export(_Loss(model), args, kwargs, strict=False).module(check_guards=False)  # pyright: ignore[reportReturnType]
    except SequenceParallelError:
        raise
    except Exception as error:
        raise SequenceParallelError(
            "torch.export cannot capture the model's graph",
            found=f"{type(error).__name__}: {first_line(error)}",
            next="a graph must not depend on the values of its inputs",
        ) from error


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    return leaf


def _check_same(leaves: list[Any], group: dist.ProcessGroup) -> None:
    """Raises where processes were given different batches: each needs the whole one."""
    sums = [leaf.detach().double().sum() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not sums:
        return
    # One maximum tells both ends: of the sums, and of their negatives.
    mine = torch.stack([*sums, *(-each for each in sums)])
    highest = mine.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    if not torch.equal(highest[: len(sums)], -highest[len(sums) :]):
        raise SequenceParallelError(
            "processes were given different batches",
            next="every process passes the whole batch: sequences are divided inside",
        )
