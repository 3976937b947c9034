"""Rows of like lengths together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.workloads.base import Workload
from torchwright.workloads.rows import inputs_of

WORTH = 0.05
"""Share of the padded tokens that buckets must save."""


@dataclass(frozen=True, kw_only=True)
class ShapeBuckets(Technique):
    """Sort the rows of a ragged batch by length and run them in a few calls, each padded to its own longest row."""

    name: ClassVar[str] = "shape_buckets"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"ragged"})
    gives: ClassVar[frozenset[str]] = frozenset({"bucketed"})

    count: int = 3
    """Most calls that one batch is split into."""
    multiple: int = 16
    """Padded lengths are multiples of this many tokens."""

    def refuse(self, target: Target) -> str | None:
        if self.count < 2 or self.multiple < 1:
            return f"{self.count} buckets of multiples of {self.multiple}: at least 2 buckets and 1 token are needed"
        if "ragged" not in target.properties:
            return "the rows of its calls do not differ in length: there is no padding to save"
        before, after = _padded_tokens(target.workload), _padded_tokens(self.reshape(target.workload))
        if after > (1 - WORTH) * before:
            return f"{after} padded tokens instead of {before}: under {WORTH:.0%} to save"
        return None

    def reshape(self, workload: Workload) -> Workload:
        return workload.bucketed(self.count, self.multiple) or workload

    def apply(self, target: Target) -> None:
        shapes = [inputs_of(call)[0].shape for call in target.workload.graphs(torch.float32)]
        text = ", ".join(f"{B} x {T}" for B, T in shapes)
        self.cover(target, 1, unit="batches", kernel=f"calls of {text}")


def _padded_tokens(workload: Workload) -> int:
    return sum(inputs_of(call)[0].numel() for call in workload.graphs(torch.float32))
