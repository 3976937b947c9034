"""Memory retention between two calls."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from torchwright.hardware.devices.allocator import (
    HUGE_PAGES,
    PACKAGES,
    environment_for,
    find_allocator,
    huge_pages_fault,
    retain_fault,
)
from torchwright.optimization.techniques.base import Phase, Target, Technique


@dataclass(frozen=True, kw_only=True)
class Allocator(Technique):
    """Keep freed activations in the process instead of handing them to the kernel and faulting them in again."""

    name: ClassVar[str] = "allocator"
    phase: ClassVar[Phase] = Phase.PROCESS
    runs_only: ClassVar[bool] = True
    keeps_pages: ClassVar[bool] = True
    least_gain: ClassVar[float] = 1.05  # everything else in its user's process is changed with it

    kind: Literal["retain", "huge_pages", "jemalloc", "mimalloc", "tcmalloc"] = "retain"
    """`retain`: glibc's malloc keeps freed memory; `huge_pages`: PyTorch asks for pages of 2 MB
    (THP_MEM_ALLOC_ENABLE); the others replace malloc, where they are installed (LD_PRELOAD). All but `retain` must
    be set when a process starts: a user who loads the artifact must start theirs the same way, and gets a notice
    otherwise."""

    def variants(self, target: Target) -> Iterable[Self]:
        # Not the others: loading an artifact cannot bring one into a process that runs already.
        yield self

    def refuse(self, target: Target) -> str | None:
        if target.device.kind != "cpu":
            return f"activations live in {target.device.kind} memory, which torch's own allocator keeps"
        if self.kind == "retain":
            return retain_fault()
        if self.kind == HUGE_PAGES:
            return huge_pages_fault()
        if not sys.platform.startswith("linux"):
            return f"LD_PRELOAD is Linux's; this is {sys.platform}"
        if find_allocator(self.kind) is None:
            return f"lib{self.kind} is not installed; on Debian or Ubuntu: apt install {PACKAGES[self.kind]}"
        return None

    def apply(self, target: Target) -> None:
        target.settings.allocator = self.kind
        self.cover(target, 1, unit="settings", kernel=self.kind)

    def environment(self) -> dict[str, str]:
        if self.kind == "retain" or (self.kind != HUGE_PAGES and find_allocator(self.kind) is None):
            return {}
        return environment_for(self.kind)
