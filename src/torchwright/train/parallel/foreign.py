"""Data parallelism for a transformers model: FSDP2, and with `dp_replicate` copies of the shards."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from torchwright.train.layout import Layout
from torchwright.train.parallel.apply import sum_gradients
from torchwright.train.parallel.mesh import shard_mesh


def shard_foreign(model: nn.Module, layers: Iterable[nn.Module], layout: Layout, mesh: DeviceMesh) -> None:
    """Shard each of its `layers`, and the rest, in place; every process holds the same weights.

    Parameters are gathered in their own dtype: only autocast knows which of an unknown model's layers take bfloat16.
    """
    if layout.processes == 1:
        return
    part = shard_mesh(mesh, layout)
    for layer in layers:
        fully_shard(layer, mesh=part)
    fully_shard(model, mesh=part)
    register_fsdp_forward_method(model, "loss")
    sum_gradients(model)
