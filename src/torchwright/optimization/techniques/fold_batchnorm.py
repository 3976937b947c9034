"""Folding batch normalization into the layer before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from torchwright.core.errors import RefusedTechnique
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.batchnorm import FOLDABLE, fold
from torchwright.optimization.techniques.shared.rest_of_norm import NORMS
from torchwright.optimization.techniques.shared.wrapping import named, outputs, worst_error

TOLERANCE = 1e-3
"""Largest relative error of any output after folding, in float32."""


@dataclass(frozen=True, kw_only=True)
class FoldBatchNorm(Technique):
    """Fold each batch norm into the weights of the convolution or linear layer before it."""

    name: ClassVar[str] = "fold_batchnorm"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"eager", "float32", "batch_norm"})
    removes: ClassVar[frozenset[str]] = frozenset({"batch_norm"})

    def refuse(self, target: Target) -> str | None:
        if not any(named(target.model, NORMS)):
            return "the model has no batch norm"
        if not any(named(target.model, FOLDABLE)):
            return "the model has no convolution or linear layer to fold a batch norm into"
        return None

    def apply(self, target: Target) -> None:
        model, cases = target.model, target.workload.cases(torch.float32)
        before = outputs(model, cases)
        folded = fold(model, cases)
        error = worst_error(before, outputs(model, cases))
        if error > TOLERANCE or not folded.replaced:
            folded.undo(model)
            raise RefusedTechnique(
                "batch norms cannot be folded into this model",
                found=f"the outputs change by {error:.1e}, {TOLERANCE:.0e} is allowed"
                if folded.replaced
                else f"none of {folded.total} can be: {'; '.join(sorted(set(folded.skipped.values())))}",
            )
        self.cover(target, folded.total, unit="batch norms", skipped=folded.skipped)
