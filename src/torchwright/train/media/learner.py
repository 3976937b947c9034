"""The learner of a run: the model, its loss and its optimizer, and the training step."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

import torch

from torchwright.train.media.adapt import adapt
from torchwright.train.media.config import MediaRun
from torchwright.train.media.model import LabelLoss, Media, fill_gradients, shard
from torchwright.train.media.samples import MediaBatch, Samples
from torchwright.train.parallel import make_mesh
from torchwright.train.parallel.batch import own_part_of_rows
from torchwright.train.run.config import run as config
from torchwright.train.run.config.schedule import factor
from torchwright.train.run.objectives.optimizer import Optimizers
from torchwright.train.run.objectives.precision import autocast
from torchwright.train.run.objectives.step import StepFigures, gradients


class MediaLearner:
    """A run's model and optimizer, on this process's part of its layout."""

    def __init__(self, run: MediaRun, model: Media, device: str, *, classes: int | None = None) -> None:
        """`classes` is how many a classifier's head tells apart."""
        self.run, self.device = run, device
        mesh = make_mesh(run.parallel, device)
        self.part = own_part_of_rows(run.parallel, mesh)
        self.model = model.to(device)
        if run.lora is not None:
            adapt(self.model, run.lora, classes, run.seed)
        self.model.train()
        shard(self.model, run.parallel, mesh)
        self.optimizers = Optimizers(
            self.model, config.OptimizerSection(**run.optimizer.model_dump()), compiled=False
        )
        self.objective = LabelLoss(self.model)

    @property
    def own(self) -> int:
        """Samples of a step that this process computes."""
        return self.run.batch // self.run.parallel.batch_ways

    def of_step(self, step: int, samples: Samples) -> list[MediaBatch]:
        """Return this process's part of the samples of a step (from 0), in micro-batches."""
        return [
            self.on_device(samples.batch(step * self.run.batch + place.start, len(place)))
            for place in self.places()
        ]

    def places(self) -> list[range]:
        """Which of a step's samples each micro-batch of this process holds."""
        size = self.own // self.run.micro_batches
        first = self.part * self.own
        return [range(first + size * n, first + size * (n + 1)) for n in range(self.run.micro_batches)]

    def on_device(self, batch: MediaBatch) -> MediaBatch:
        inputs = {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in batch.inputs.items()
        }
        return MediaBatch(inputs=inputs, labels=batch.labels.to(self.device))

    def begin(self, step: int) -> None:
        """Seed the step: random draws depend only on the run's seed, the step and the process."""
        torch.manual_seed(hash((self.run.seed, step, self.part)))

    def gradients(
        self, batches: Sequence[MediaBatch], *, leave: bool = False, failed: bool = False
    ) -> StepFigures:
        """Every parameter's gradient of the step, summed over all processes and clipped; see `gradients`."""
        figures = gradients(
            self.model,
            self.objective,
            batches,
            copies=1,
            precision=autocast(self.run.precision, self.device),
            clip=self.run.clip,
            leave=leave,
            failed=failed,
        )
        self.model.average_statistics()
        return figures

    def again(self, step: int, batches: Sequence[MediaBatch], number: int) -> None:
        """The gradients of one of the step's micro-batches, as at first."""
        self.begin(step)
        self.gradients([batches[number]])

    def rate(self, step: int) -> float:
        """The factor on the peak learning rate of a step (from 0)."""
        schedule, steps = self.run.schedule, self.run.steps
        warmup = schedule.warmup_samples
        decay = round(steps * schedule.decay_fraction)
        if schedule.name == "cosine":
            decay = steps - -(-warmup // self.run.batch)
        return factor(
            schedule.name,
            warm=(step + 1) * self.run.batch / warmup if warmup else 1.0,
            left=steps - (step + 1),
            decay=max(0, min(steps - 1, decay)),
            final=schedule.final,
        )

    def update(self, step: int) -> None:
        """Move the parameters by their gradients, and let these go."""
        fill_gradients(self.model.parameters())
        self.optimizers.step(self.rate(step))

    @contextlib.contextmanager
    def evaluating(self) -> Generator[None]:
        """Nothing is dropped in the block, and batch norms go by what they noted."""
        self.model.eval()
        yield
        self.model.train()

    def prepare(self) -> None:
        """Create the optimizer's state."""
        self.optimizers.prepare()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a step changes, by name."""
        found = {
            f"model.{name}": value.detach()
            for name, value in self.model.named_parameters()
            if value.requires_grad
        }
        found |= {f"model.{name}": value for name, value in self.model.statistics().items()}
        return found | {f"optimizer.{name}": value for name, value in self.optimizers.tensors().items()}
