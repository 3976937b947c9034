"""The learner of a run: the head, its loss and its optimizer, and the training step."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

import torch

from torchwright.train.draft.config import DraftRun
from torchwright.train.draft.head import EagleHead
from torchwright.train.draft.mtp_head import MtpHead
from torchwright.train.draft.objective import DraftBatch, DraftLoss, DraftModel
from torchwright.train.draft.target import TargetModel
from torchwright.train.parallel import make_mesh
from torchwright.train.parallel.foreign import shard_foreign
from torchwright.train.run.config import run as config
from torchwright.train.run.config.schedule import rate
from torchwright.train.run.objectives.optimizer import Optimizers
from torchwright.train.run.objectives.precision import autocast
from torchwright.train.run.objectives.setup import Batches
from torchwright.train.run.objectives.step import StepFigures, gradients


class DraftLearner:
    """A run's head and optimizer, on this process's part of its layout."""

    def __init__(self, run: DraftRun, head: EagleHead | MtpHead, target: TargetModel, device: str) -> None:
        self.run, self.device = run, device
        mesh = make_mesh(run.parallel, device)
        self.model = DraftModel(head.to(device), target, run.head.steps, run.head.decay)
        shard_foreign(self.model, (), run.parallel, mesh)
        self.optimizers = Optimizers(
            self.model, config.OptimizerSection(**run.optimizer.model_dump()), compiled=False
        )
        self.objective = DraftLoss(self.model)
        self.batches = Batches(run.text, mesh, device)

    def gradients(
        self, batches: Sequence[DraftBatch], *, leave: bool = False, failed: bool = False
    ) -> StepFigures:
        """Every parameter's gradient of the step, summed over all processes and clipped; see `gradients`."""
        return gradients(
            self.model,
            self.objective,
            batches,
            copies=1,
            precision=autocast(self.run.precision, self.device),
            clip=self.run.clip,
            leave=leave,
            failed=failed,
        )

    def update(self, step: int) -> None:
        """Move the parameters by their gradients, and let these go."""
        self.optimizers.step(rate(self.run.text, step))

    @contextlib.contextmanager
    def measuring(self) -> Generator[None]:
        """Compute as in a step, without gradients."""
        with torch.no_grad(), autocast(self.run.precision, self.device):
            yield

    def prepare(self) -> None:
        """Create the optimizer's state."""
        self.optimizers.prepare()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a step changes, by name."""
        found = {f"model.{name}": value.detach() for name, value in self.model.named_parameters()}
        return found | {f"optimizer.{name}": value for name, value in self.optimizers.tensors().items()}
