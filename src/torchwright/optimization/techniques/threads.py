"""The number of threads of one call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torchwright.optimization.techniques.base import Phase, Target, Technique


@dataclass(frozen=True, kw_only=True)
class Threads(Technique):
    """Use fewer threads than cores: small operations cost more to share than to do."""

    name: ClassVar[str] = "threads"
    phase: ClassVar[Phase] = Phase.RUNTIME

    count: int = 1
    """Threads that share one operation."""

    def variants(self, target: Target) -> Iterable[Self]:
        count = target.device.cores // 2
        while count >= 1:
            yield replace(self, count=count)
            count //= 2

    def refuse(self, target: Target) -> str | None:
        if target.device.kind != "cpu":
            return "threads only matter on the CPU"
        if not 1 <= self.count <= target.device.cores:
            return f"{self.count} threads on {target.device.cores} cores"
        if self.count == target.device.cores:
            return f"all {self.count} cores are used already"
        return None

    def apply(self, target: Target) -> None:
        target.settings.threads = self.count
        self.cover(target, 1, unit="settings", kernel=f"{self.count} threads")
