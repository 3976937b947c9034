"""Each process's part of a batch, and sums over all parts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchwright.train.layout import Layout, LayoutError
from torchwright.train.parallel.zigzag import places

LOSS_AXES = ("dp_replicate", "dp_shard", "cp")
"""Processes along these see different tokens; those along tp see the same."""


def local_batch(
    ids_BT: torch.Tensor, labels_BT: torch.Tensor, layout: Layout, mesh: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This process's ids, labels and positions (T/cp,) of a global batch whose labels are shifted already.

    Rows are divided over dp_replicate and dp_shard in order, each row's tokens over cp in pieces (`zigzag.py`). Raises
    `LayoutError` for rows or tokens that do not divide.
    """
    B, T = ids_BT.shape
    _check_divides("rows in the batch", B, layout.batch_ways, "dp_replicate · dp_shard")
    _check_divides("tokens in a row", T, layout.cp * layout.tp, "cp · tp")
    part = own_part_of_rows(layout, mesh)
    rows = slice(part * B // layout.batch_ways, (part + 1) * B // layout.batch_ways)
    positions_T = own_tokens(T, layout, mesh).to(ids_BT.device)
    return ids_BT[rows, positions_T], labels_BT[rows, positions_T], positions_T


def own_part_of_rows(layout: Layout, mesh: DeviceMesh) -> int:
    """Which of the batch's `layout.batch_ways` parts is this process's."""
    return mesh.get_local_rank("dp_replicate") * layout.dp_shard + mesh.get_local_rank("dp_shard")


def own_tokens(tokens: int, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """This process's places (tokens / cp,) in a sequence of that many tokens, rising."""
    return places(tokens, mesh.get_local_rank("cp"), layout.cp)


def global_sum(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of each process's `value` over all parts of the batch; without gradient, in the value's own dtype."""
    total = value.detach().clone()
    for axis in LOSS_AXES:
        if mesh[axis].size() > 1:
            dist.all_reduce(total, group=mesh.get_group(axis))
    return total


def _check_divides(what: str, count: int, ways: int, axes: str) -> None:
    if count % ways:
        raise LayoutError(
            f"the layout divides the {what} into {axes} = {ways} parts",
            found=f"{count} {what}",
            allowed=f"multiples of {ways}",
            next="change the batch or the layout",
        )
