"""Process meshes of a layout: one for what all processes share, one for the experts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchwright.train.layout import Layout


def make_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh (dp_replicate, dp_shard, pp, cp, tp) over all processes; unused dimensions are there, of size 1.

    Raises `LayoutError` where the number of processes is not the layout's.
    """
    layout.check_processes(dist.get_world_size())
    sizes = (layout.dp_replicate, layout.dp_shard, layout.pp, layout.cp, layout.tp)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("dp_replicate", "dp_shard", "pp", "cp", "tp"))


def shard_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """Return the mesh that FSDP takes from `make_mesh`'s: dp_shard and cp as one dimension, dp_replicate before it
    for HSDP.

    Processes along cp hold the same parameters as well, so they share them out too.
    """
    if layout.cp > 1 and layout.dp_shard > 1:
        shard = mesh["dp_shard", "cp"]._flatten("fsdp")
    else:
        shard = mesh["cp" if layout.cp > 1 else "dp_shard"]
    return DeviceMesh._concatenate([mesh["dp_replicate"], shard]) if layout.dp_replicate > 1 else shard


def make_experts_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh (dp_replicate, pp, fsdp, ep, tp) over the same processes: `fsdp` is what ep leaves of dp_shard · cp."""
    ranks = torch.arange(layout.processes).view(
        layout.dp_replicate, layout.dp_shard, layout.pp, layout.cp, layout.tp
    )
    # A stage's experts are spread over the processes that hold the stage: pp goes out of the way.
    sizes = (layout.dp_replicate, layout.pp, -1, layout.ep, layout.tp)
    names = ("dp_replicate", "pp", "fsdp", "ep", "tp")
    return DeviceMesh(device_type, ranks.movedim(2, 1).reshape(sizes), mesh_dim_names=names)


def experts_shard_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """Return the mesh that FSDP takes from `make_experts_mesh`'s."""
    return mesh["dp_replicate", "fsdp"] if layout.dp_replicate > 1 else mesh["fsdp"]
