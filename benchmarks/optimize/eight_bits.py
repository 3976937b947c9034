"""The loss of trained models' tasks by 8-bit layers, for each way to round them.

    python -m benchmarks.optimize.eight_bits [--only NAME …] [--steps STEP …] [--sounds DATA] [--json FILE]

The models are those of benchmarks/optimize/trained.py, with the packages that it names. A step is written as on the
command line, as in `int8_static:smooth=false`. Calls of the search calibrate; held-out calls are judged, in eager code
that computes what the compiled layers compute. Two figures: the relative error of all answers, and the loss of the
task's metric.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.harness import run
from benchmarks.harness.run import Row, in_short
from benchmarks.models.trained.task import Trained, answers
from benchmarks.optimize.trained import MODELS
from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.techniques.base import parse_step
from torchwright.workloads.accuracy import scalar
from torchwright.workloads.module import ModuleWorkload

STEPS = ["int8_static:smooth=false", "int8_static", "int8_dynamic"]
COLUMNS = ("model", "step", "layers", "smoothed", "error", "metric", "original", "loss", "seconds to apply")


def main() -> None:
    options = run.options(
        __doc__, only=tuple(MODELS), steps=STEPS, sounds=run.Option(type=Path, default=Path("/"))
    )
    rows = run.Rows(options.json, COLUMNS)
    for name in options.only:
        trained = MODELS[name](options.sounds)
        original = Remembering(trained.model)
        exact, reference = answers(original, trained.held_out), trained.held_out_metric(original)
        for text in options.steps:
            try:
                row = judged(trained, parse_step(text), exact, reference)
            except Exception as error:  # whatever a step dies of is its row
                rows.add({"model": name, "step": text, "failure": in_short(error)}, f"{name}, {text}: failed")
                continue
            rows.add({"model": name, "step": text} | row, run.line((name, text, *row.values())))


class Remembering(nn.Module):
    """A model that is called once on each input, however often it is asked."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self._answers = model, dict[int, torch.Tensor]()

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        key = inputs[0].data_ptr()  # inputs of a task live as long as the task
        if key not in self._answers:
            self._answers[key] = self.model(*inputs)
        return self._answers[key]


def judged(trained: Trained, step: Step, exact: torch.Tensor, reference: float) -> Row:
    """Return one step's row."""
    workload = ModuleWorkload(
        trained.model,
        trained.search,
        metric=trained.search_metric,
        higher_is_better=trained.higher_is_better,
    )
    target = make_target(workload, get_device("cpu").identify())
    begun = time.perf_counter()
    apply_steps(target, (step, Step(name="compile")))
    seconds = time.perf_counter() - begun
    model = Remembering(target.model)
    got, value = answers(model, trained.held_out), trained.held_out_metric(model)
    quality = scalar("", reference, value, trained.higher_is_better)
    coverage = next(each for each in target.coverage if each.technique == step.name)
    return {
        "layers": f"{coverage.changed} of {coverage.total}",
        "smoothed": sum(getattr(each, "smooth", None) is not None for each in target.model.modules()),
        "error": f"{((got - exact).norm() / exact.norm()).item():.4f}",
        "metric": f"{value:.5f}",
        "original": f"{reference:.5f}",
        "loss": f"{quality.drop:.2%}",
        "seconds": f"{seconds:.1f}",
    }


if __name__ == "__main__":
    main()
