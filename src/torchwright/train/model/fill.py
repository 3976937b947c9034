"""Values for parameters, whole or sharded: a process keeps its own part of a tensor that it has in full."""

from __future__ import annotations

import zlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from torchwright.models.decoder.config import DecoderConfig
from torchwright.train.model.blocks import MixtureOfExperts
from torchwright.train.model.four_bit import FourBit
from torchwright.train.model.layer_inputs import InputLayer
from torchwright.train.model.recurrent import start

DEVIATION = 0.02


@torch.no_grad()
def fill(parameter: torch.Tensor | FourBit, full: torch.Tensor) -> None:
    """Copy `full`, or this process's part, into `parameter`; a frozen matrix rounds it to its own format."""
    if isinstance(parameter, FourBit):
        parameter.pack(full)
    elif isinstance(parameter, DTensor):
        parameter.to_local().copy_(own_part(full, parameter))
    else:
        parameter.copy_(full)


def own_part(full: torch.Tensor, like: DTensor) -> torch.Tensor:
    """The part of `full` that this process holds of `like`; nothing is sent.

    Inner mesh dimensions first: where FSDP shards what tensor parallelism has sharded on the same dimension, it cuts
    the inner part.
    """
    mesh = like.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "the process is not part of the parameter's mesh"
    for place in reversed(range(mesh.ndim)):
        placement = like.placements[place]
        if isinstance(placement, Replicate):
            continue
        dim = placement.dim  # pyright: ignore[reportAttributeAccessIssue]  # Shard and _StridedShard
        parts = full.chunk(mesh.size(place), dim)
        empty = full.narrow(dim, 0, 0)
        full = parts[coordinate[place]] if coordinate[place] < len(parts) else empty
    return full


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor; of a sharded one every process of its mesh must ask.

    Gathered one mesh dimension at a time, in the order that undoes `own_part`.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    for place in range(tensor.device_mesh.ndim):
        placements = list(tensor.placements)
        placements[place] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the contents of a model's files, by our names: parameters, biases that choose experts, layers' scales."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts) and module.bias is not None:
            found[f"{name}.bias"] = module.bias
        if isinstance(module, InputLayer):
            found[f"{name}.layer_scale"] = module.layer_scale
    return found


@torch.no_grad()
def initialize(model: nn.Module, config: DecoderConfig, seed: int) -> None:
    """See `Transformer.reset_parameters`."""
    into_residual = DEVIATION / (2 * config.layers) ** 0.5
    for name, parameter in named_tensors(model).items():
        vector = start(name, parameter.shape[0])
        if vector is not None:
            fill(parameter, vector)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif name.endswith(("out_norm.weight", "scale", "scale.weight")):  # whose weights have no offset
            nn.init.ones_(parameter)
        elif "norm" in name or name.split(".")[-2].startswith(("pre_", "post_")):
            nn.init.constant_(parameter, 1 - config.norm_offset)
        else:
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            # A matrix is called by its module, stacked experts by the parameter itself.
            parts = name.removesuffix(".weight").split(".")
            deviation = into_residual if parts[-1] in ("o", "down") else DEVIATION
            full = torch.empty(parameter.shape, device="cpu")
            fill(parameter, full.normal_(std=deviation, generator=generator))
