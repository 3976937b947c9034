"""One rank of a distributed run on simulated devices: DDP or FSDP2 against one process on the CPU.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=… python ranks.py ddp
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

STEPS = 3
ROWS = 8


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))


def train(model: nn.Module, batches: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def main(wrap: Callable[[nn.Module], nn.Module]) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    batches = [torch.randn(ROWS * ranks, 6) for _ in range(STEPS)]
    reference = make()
    train(reference, batches)
    model = wrap(make().to("sim"))
    train(model, [batch[rank * ROWS : (rank + 1) * ROWS].to("sim") for batch in batches])
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        whole = one.full_tensor() if hasattr(one, "full_tensor") else one
        assert whole.device.type == "sim"
        torch.testing.assert_close(whole.detach().cpu(), other.detach())
    dist.barrier()
    dist.destroy_process_group()


def collectives() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), float(rank), device="sim")
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert x.tolist() == [1.0] * 4
    parts = [torch.empty(2, device="sim") for _ in range(ranks)]
    dist.all_gather(parts, torch.full((2,), float(rank), device="sim"))
    assert [part.tolist() for part in parts] == [[0.0, 0.0], [1.0, 1.0]]
    whole = torch.empty(4, device="sim")
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank), device="sim"))
    assert whole.tolist() == [0.0, 0.0, 1.0, 1.0]
    piece = torch.empty(2, device="sim")
    dist.reduce_scatter_tensor(piece, torch.arange(4.0, device="sim"))
    assert piece.tolist() == ([0.0, 2.0] if rank == 0 else [4.0, 6.0])
    y = torch.full((3,), float(rank + 5), device="sim")
    dist.broadcast(y, 1)
    assert y.tolist() == [6.0] * 3
    if rank == 0:
        dist.send(y, 1)
    else:
        dist.recv(z := torch.zeros(3, device="sim"), 0)
        assert z.tolist() == [6.0] * 3
    dist.barrier()
    dist.destroy_process_group()


def fsdp(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    match sys.argv[1]:
        case "ddp":
            main(nn.parallel.DistributedDataParallel)
        case "fsdp":
            main(fsdp)
        case "collectives":
            collectives()
