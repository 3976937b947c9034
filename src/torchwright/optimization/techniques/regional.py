"""Compiling one of a model's repeated blocks and reusing its code for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

from torchwright.core.records import DeviceFacts
from torchwright.hardware.measure.toolchain import compiler_fault
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.blocks import repeated_blocks

FEWEST = 3
"""With fewer equal blocks there is little compilation to save, and fusion between blocks is lost."""


@dataclass(frozen=True, kw_only=True)
class Regional(Technique):
    """Compile one repeated block and reuse its code for every copy: less to compile, less to fuse."""

    name: ClassVar[str] = "regional"
    phase: ClassVar[Phase] = Phase.COMPILE
    needs: ClassVar[frozenset[str]] = frozenset({"eager"})
    gives: ClassVar[frozenset[str]] = frozenset({"compiled"})
    removes: ClassVar[frozenset[str]] = frozenset({"eager"})

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return compiler_fault(device)

    def variants(self, target: Target) -> Iterable[Self]:
        # A model that exports as one graph is compiled ahead of time, whole: this could only save compile time.
        if "exportable" not in target.properties:
            yield self

    def refuse(self, target: Target) -> str | None:
        count = len(repeated_blocks(target.model))
        if count < FEWEST:
            return (
                f"the longest row of equal blocks has {count}; from {FEWEST} on there is something to reuse"
            )
        return None

    def apply(self, target: Target) -> None:
        target.settings.engine = "jit"
        target.settings.regional = True
        # Frozen weights are constants of the code, which no other block could use.
        target.settings.inductor["freezing"] = False
        blocks = repeated_blocks(target.model)
        inside = {id(module) for block in blocks for module in block.modules()}
        total = sum(1 for module in target.model.modules() if not any(True for _ in module.children()))
        changed = sum(
            1 for m in target.model.modules() if id(m) in inside and not any(True for _ in m.children())
        )
        self.cover(
            target,
            total,
            changed=changed,
            kernel=f"torch.compile of {len(blocks)} {type(blocks[0]).__name__}",
        )
