"""The computing part of a run: the model in its layout, its loss and its optimizers, and one step.

The trainer and `torchwright prove` take this very class, so that what is proved is what trains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from torchwright.train.model import Transformer
from torchwright.train.model.foreign import ModelConfig
from torchwright.train.parallel.pipeline import PipelineRunner
from torchwright.train.parallel.stages import Staged
from torchwright.train.run.config.run import Run
from torchwright.train.run.config.schedule import ScheduledStep
from torchwright.train.run.objectives.balancing import Balancing
from torchwright.train.run.objectives.heads import Classes, Vectors
from torchwright.train.run.objectives.objective import MicroBatch, NextToken, Objective
from torchwright.train.run.objectives.optimizer import Optimizers
from torchwright.train.run.objectives.precision import TENSORWISE, autocast, renew_scales
from torchwright.train.run.objectives.preference import Preferences
from torchwright.train.run.objectives.setup import Batches, build_model
from torchwright.train.run.objectives.step import StepFigures, gradients


class LanguageLearner:
    """A run's model and optimizers, on this process's part of its layout."""

    def __init__(self, run: Run, config: ModelConfig, folder: Path, device: str) -> None:
        self.run, self.device, self.clip = run, device, run.clip
        self.model, self.mesh = build_model(run, config, folder, device)
        self.optimizers = Optimizers(self.model, run.optimizer, compiled=run.compile)
        self.objective = self._objective()
        self.pipeline: PipelineRunner | None = None
        if isinstance(self.model, Staged):
            self.pipeline = PipelineRunner(
                self.model, run.pipeline.schedule, partial(autocast, run.precision, device)
            )
        self.balancing: Balancing | None = None
        if isinstance(self.model, Transformer) and self.model.config.experts is not None:
            self.balancing = Balancing(self.model, run.experts, run.micro_batches, self.mesh, device)
        self.batches = Batches(run, self.mesh, device)
        self.random = any(isinstance(module, nn.Dropout) for module in self.model.modules())
        """Check whether a step draws random numbers."""

    def _objective(self) -> Objective[MicroBatch]:
        run, model = self.run, self.model
        if run.needs is None:
            return NextToken(model, compiled=run.compile)
        assert isinstance(model, Transformer)
        if run.preference is not None:
            return Preferences(model, run.preference)
        assert run.head is not None
        return Classes(model) if run.head.labels is not None else Vectors(model, run.head)

    def begin(self, step: ScheduledStep) -> None:
        """Seed a step: its random numbers depend on the run's seed, the step and the process alone."""
        if self.random:
            torch.manual_seed(hash((self.run.seed, step.number, self.batches.part)))

    @contextlib.contextmanager
    def evaluating(self) -> Generator[None]:
        """Switch dropout off in the block."""
        if self.random:
            self.model.eval()
        yield
        self.model.train()

    def gradients(
        self, batches: Sequence[MicroBatch], *, leave: bool = False, failed: bool = False
    ) -> StepFigures:
        """Every parameter's gradient of the step, summed over all processes and clipped; see `gradients`."""
        figures = gradients(
            self.model,
            self.objective,
            batches,
            copies=self.run.parallel.tp * self.run.parallel.pp,
            precision=autocast(self.run.precision, self.device),
            clip=self.clip,
            pipeline=self.pipeline,
            leave=leave,
            failed=failed,
        )
        if self.balancing is None:
            return figures
        return replace(figures, more={**figures.more, **self.balancing.measure()})

    def again(self, step: ScheduledStep, batches: Sequence[MicroBatch], number: int) -> None:
        """The gradients of one of the step's micro-batches, as at first."""
        self.begin(step)
        self.gradients([batches[number]])

    def places(self, step: ScheduledStep, batches: Sequence[MicroBatch]) -> list[range]:
        """Which of the step's rows each of this process's micro-batches holds."""
        first, found = self.batches.part * self.batches.rows(step.rows), list[range]()
        for batch in batches:
            found.append(range(first, first + batch.ids_BT.shape[0]))
            first = found[-1].stop
        return found

    def update(self, step: ScheduledStep) -> None:
        """Move the parameters by their gradients, and let these go."""
        self.optimizers.step(step.rate)
        if self.run.gather is not None and self.run.precision == TENSORWISE:
            renew_scales(self.model)
        if self.balancing is not None:
            self.balancing.update()

    def prepare(self) -> None:
        """Create the optimizers' state."""
        self.optimizers.prepare()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything of the model that a step changes, by name."""
        found = {name: value.detach() for name, value in self.model.named_parameters() if value.requires_grad}
        return found | (self.balancing.tensors() if self.balancing else {})
