"""What happens to memory between two calls."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from torchwright.devices.allocator import PACKAGES, find_allocator, retain_fault
from torchwright.facts import Coverage
from torchwright.techniques.base import Phase, Target, Technique


@dataclass(frozen=True, kw_only=True)
class Allocator(Technique):
    """Keep freed activations in the process instead of handing them to the kernel and faulting them in again."""

    name: ClassVar[str] = "allocator"
    phase: ClassVar[Phase] = Phase.PROCESS
    least_gain: ClassVar[float] = 1.05  # everything else in its user's process is changed with it

    kind: Literal["retain", "jemalloc", "mimalloc", "tcmalloc"] = "retain"
    """`retain`: glibc's malloc keeps what is freed; the others replace malloc, where they are installed, in a process
    that is started with LD_PRELOAD: whoever loads the artifact must start theirs so, too, or is told."""

    def variants(self, target: Target) -> Iterable[Self]:
        # Not the others: loading an artifact cannot bring an allocator into a process that runs already.
        yield self

    def refuse(self, target: Target) -> str | None:
        if target.device.kind != "cpu":
            return f"activations live in {target.device.kind} memory, which torch's own allocator keeps"
        if self.kind == "retain":
            return retain_fault()
        if not sys.platform.startswith("linux"):
            return f"LD_PRELOAD is Linux's; this is {sys.platform}"
        if find_allocator(self.kind) is None:
            return f"lib{self.kind} is not installed; on Debian or Ubuntu: apt install {PACKAGES[self.kind]}"
        return None

    def apply(self, target: Target) -> None:
        target.settings.allocator = self.kind
        target.coverage.append(
            Coverage(technique=self.name, changed=1, total=1, unit="settings", kernel=self.kind)
        )

    def environment(self) -> dict[str, str]:
        library = None if self.kind == "retain" else find_allocator(self.kind)
        return {"LD_PRELOAD": library} if library else {}
