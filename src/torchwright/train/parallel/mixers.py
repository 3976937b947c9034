"""Recurrent mixers under tensor parallelism: heads or channels are divided."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
)

from torchwright.models.decoder.config import DecoderConfig
from torchwright.train.layout import Layout, LayoutError
from torchwright.train.mixer_shape import refused
from torchwright.train.model.recurrent import GatedNorm, Mamba2, RecurrentMixer

TOKENS = Shard(1)
KEYS = ("k", "q")


def mixer_plan(
    block: str, mixer: RecurrentMixer, whole: ParallelStyle, use: ParallelStyle
) -> dict[str, ParallelStyle]:
    """Return the styles of a layer's mixer, called `block`.

    Keys and queries that all heads of a state space share are `whole` in every process, which each `use`s for its own
    heads; its norm is over the heads of all processes. A norm whose weights every head has is whole too. All else is
    divided.
    """
    shared = isinstance(mixer, Mamba2) and mixer.key_heads == 1
    plan: dict[str, ParallelStyle] = {
        block: PrepareModuleInput(
            input_layouts=(TOKENS, None, None),
            desired_input_layouts=(Replicate(), None, None),
            use_local_output=shared,
        ),
        f"{block}.o": RowwiseParallel(output_layouts=TOKENS),
    }
    for part, module in mixer.named_children():
        if part == "o" or (part == "shared" and not shared):
            continue
        of_all = shared and part.partition("_")[0] in KEYS
        if part == "shared":
            style = use
        elif isinstance(module, nn.Linear):
            style = whole if of_all else ColwiseParallel()
        elif isinstance(module, GatedNorm):
            by_head = not isinstance(mixer, Mamba2)
            style = AcrossHeads() if shared else Divided(Replicate() if by_head else Shard(0))
        else:
            style = Divided(Replicate() if of_all else Shard(0))
        plan[f"{block}.{part}"] = style
    return plan


class Divided(ParallelStyle):
    """A module that computes on this process's part of its parameters, which lie as `placement` says.

    Its forward takes that part with `own`, and local tensors.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            divided = distribute_tensor(parameter.data, device_mesh, [self.placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
        return module


class AcrossHeads(ParallelStyle):
    """A norm over all processes' heads together: their squares are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, GatedNorm)
        group = device_mesh.get_group()
        module.part //= device_mesh.size()
        module.mean = lambda square: summed(square, group) / device_mesh.size()
        return Divided(Shard(0))._apply(module, device_mesh)


def summed(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum of all processes' `x`, of which each gives the gradient from its own use."""
    return _Summed.apply(x, group)  # type: ignore[return-value]


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return wait_tensor(all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return wait_tensor(all_reduce(gradients[0].contiguous(), "sum", ctx.group)), None


def check_mixer(config: DecoderConfig, layout: Layout) -> None:
    """Raise `LayoutError` for a layout that the model's recurrent layers do not take."""
    found = refused(config, layout)
    if found is not None:
        what, numbers = found
        raise LayoutError(
            f"{what}, in a model with recurrent layers", found=numbers, next="use dp_shard in its place"
        )
