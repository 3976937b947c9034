"""The computing part of a recommender's run: tables, dense layers and their optimizers, and one step of them.

The trainer, `torchwright prove` and the report's drift take this very class.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from torchwright.train.recommender.config import RecommenderRun
from torchwright.train.recommender.embeddings import ShardedEmbeddings, ShardPlan, Topology
from torchwright.train.recommender.layout import look_ups, make_groups, replica_of, row_optimizer
from torchwright.train.recommender.losses import Loss
from torchwright.train.recommender.models import build_dense, tables_of
from torchwright.train.recommender.store import ClickBatch
from torchwright.train.run.objectives.step import StepFigures


class RecommenderLearner:
    """A run's tables and dense layers, on this process's part of its layout."""

    def __init__(
        self,
        run: RecommenderRun,
        topology: Topology,
        plan: ShardPlan,
        loss: Loss,
        device: str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Collective: every process of the default group makes one."""
        self.run, self.loss = run, loss
        rank = dist.get_rank()
        self.replica = replica_of(topology, rank)
        self.tables = ShardedEmbeddings(
            tables_of(run),
            plan,
            row_optimizer(run.embeddings),
            groups=make_groups(topology),
            seed=run.seed,
            dtype=dtype,
            device=torch.device(device),
        )
        self.dense = build_dense(run).to(device, dtype)
        chosen = run.optimizer
        self.optimizer = torch.optim.Adam(
            self.dense.parameters(), chosen.lr, betas=chosen.betas, eps=chosen.eps
        )

    def gradients(self, batch: ClickBatch, *, leave: bool = False, failed: bool = False) -> StepFigures:
        """One step's gradients of the dense layers, the mean over all processes; the tables' rows have moved by theirs.

        `batch` is this process's part, as large as every other's.
        """
        loss = self.loss(self.dense(batch.numbers_BD, self.tables(look_ups(self.run, batch))), batch)
        loss.backward()
        mean_gradients(self.dense)
        told = torch.stack([loss.detach().double(), *(loss.new_tensor(x).double() for x in (leave, failed))])
        if dist.get_world_size() > 1:
            dist.all_reduce(told)
        total, leaving, failing = told.tolist()
        norm = nn.utils.get_total_norm(p.grad for p in self.dense.parameters() if p.grad is not None)
        return StepFigures(
            loss=total / dist.get_world_size(), grad_norm=float(norm), leave=leaving > 0, failed=failing > 0
        )

    def update(self, number: int) -> None:
        """Move the dense layers by step `number`, from 0; the copies of the tables meet where it is their turn."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        if (number + 1) % self.run.embeddings.sync_every == 0:
            self.tables.sync()

    def prepare(self) -> None:
        """Make the optimizer's state exist before the first step, for a checkpoint to fill; nothing moves."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in self.dense.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.optimizer.lr

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a step changes, by name; those of a table's copies are apart."""
        found = {f"dense.{name}": value.detach() for name, value in self.dense.named_parameters()}
        for name, parameter in self.dense.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{name}.{key}"] = value
        tables = self.tables.named_tensors()
        return found | {f"tables.{self.replica}.{name}": value for name, value in tables}


def mean_gradients(model: nn.Module) -> None:
    """Set every gradient to its mean over all processes, in one message.

    DistributedDataParallel is not used: it reorders its messages after its first step, so that a restarted run adds
    up in another order than one that went on.
    """
    if dist.get_world_size() == 1:
        return
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(
        gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(mean.view_as(gradient))
