"""The last steps of a picture without guidance.

A guided step computes each picture twice, with its prompt and without; by the last steps the difference hardly
changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torchwright.models.diffusion.workload import DiffusionWorkload
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.workloads.base import Workload


@dataclass(frozen=True, kw_only=True)
class GuidanceSkip(Technique):
    """Run the last steps on the prompt alone, and take what guidance adds from the last guided step."""

    name: ClassVar[str] = "guidance_skip"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"guided"})

    share: float = 0.5
    """The share of the steps, at the end, that skip guidance."""

    @property
    def expected_gain(self) -> float | None:
        """The gain if the denoiser takes all the time: half of each of these steps."""
        return 1 / (1 - min(max(self.share, 0.0), 1.0) / 2)

    def variants(self, target: Target) -> Iterable[Self]:
        return (replace(self, share=share) for share in (0.7, 0.5, 0.3))

    def refuse(self, target: Target) -> str | None:
        if not isinstance(target.workload, DiffusionWorkload) or "guided" not in target.properties:
            return "no step of it computes a picture with its prompt and without"
        if not 0 < self.share < 1:
            return f"share {self.share:g} of the steps: more than 0 and less than 1 is needed"
        if not self._count(target.workload):
            return f"{self.share:.0%} of {target.workload.steps} steps is none"
        return None

    def reshape(self, workload: Workload) -> Workload:
        if not isinstance(workload, DiffusionWorkload):
            return workload
        return workload.planned(replace(workload.plan, unguided=self._count(workload)))

    def apply(self, target: Target) -> None:
        assert isinstance(target.workload, DiffusionWorkload)
        unguided, steps = target.workload.plan.unguided, target.workload.steps
        self.cover(target, steps, changed=unguided, unit="steps without guidance")

    def _count(self, workload: DiffusionWorkload) -> int:
        return min(int(self.share * workload.steps), workload.steps - 1)
