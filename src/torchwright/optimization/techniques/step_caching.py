"""Steps of a picture that are not computed.

Which steps those are is measured: the original makes one picture, and a step is reused while the changes since the last
computed one add up to less than a threshold. The search tries several, and the recipe names the steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torchwright.models.diffusion.sampling import steps_to_reuse
from torchwright.models.diffusion.workload import DiffusionWorkload
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.workloads.base import Workload

THRESHOLDS = (0.4, 0.25, 0.15, 0.08)
"""Thresholds of the summed relative change up to which a prediction is reused, the boldest first."""


@dataclass(frozen=True, kw_only=True)
class StepCaching(Technique):
    """Take a step's prediction from the last computed step, where predictions change little from one to the next."""

    name: ClassVar[str] = "step_caching"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"denoising_steps"})

    reused: tuple[str, ...] = ()
    """The steps, by their numbers from 0, such as 4+5; the first and the last one are always computed. Without them
    the search takes those of several thresholds."""

    @property
    def calibrates(self) -> bool:
        return True

    @property
    def is_open(self) -> bool:
        return not self.reused

    @property
    def expected_gain(self) -> float | None:
        """The gain if the denoiser takes all the time: the steps over those that are computed."""
        if not self.reused or not all(text.isdecimal() for text in self.reused):
            return None
        least = max(map(int, self.reused)) + 2
        return least / max(least - len(self.reused), 1)

    def variants(self, target: Target) -> Iterable[Self]:
        if self.reused or not isinstance(target.workload, DiffusionWorkload):
            yield self
            return
        changes = target.workload.changes(target.model)
        plans = dict.fromkeys(steps_to_reuse(changes, threshold) for threshold in THRESHOLDS)
        found = [replace(self, reused=tuple(map(str, sorted(steps)))) for steps in plans if steps]
        yield from found or [self]

    def refuse(self, target: Target) -> str | None:
        if not isinstance(target.workload, DiffusionWorkload):
            return "it makes no pictures in steps"
        if not self.reused:
            return (
                f"no step of the {target.workload.steps} is within {THRESHOLDS[-1]:.0%} to {THRESHOLDS[0]:.0%} of the "
                "last computed one; reused=4+5 names steps all the same"
            )
        last = target.workload.steps - 1
        if last < 2:
            return f"a picture of {last + 1} steps has none between the first and the last"
        wrong = [text for text in self.reused if not (text.isdecimal() and 0 < int(text) < last)]
        return f"step {wrong[0]} is none between the first and the last, 1 to {last - 1}" if wrong else None

    def reshape(self, workload: Workload) -> Workload:
        if not isinstance(workload, DiffusionWorkload):
            return workload
        return workload.planned(replace(workload.plan, reused=frozenset(map(int, self.reused))))

    def apply(self, target: Target) -> None:
        assert isinstance(target.workload, DiffusionWorkload)
        self.cover(target, target.workload.steps, changed=len(self.reused), unit="steps reused")
