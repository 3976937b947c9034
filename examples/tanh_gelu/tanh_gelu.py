"""A technique in a package of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from torchwright.optimization.techniques.base import Phase, Target, Technique


@dataclass(frozen=True, kw_only=True)
class TanhGelu(Technique):
    """GELU layers compute its approximation by tanh instead of the error function."""

    name: ClassVar[str] = "tanh_gelu"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"eager"})
    tolerance: ClassVar[float] = 1e-2

    def refuse(self, target: Target) -> str | None:
        return None if _exact(target.model) else "no layer of the model is an exact nn.GELU"

    def apply(self, target: Target) -> None:
        found = _exact(target.model)
        for layer in found:
            layer.approximate = "tanh"
        self.cover(target, len(found), unit="GELU layers", kernel="gelu(approximate='tanh')")


def _exact(model: nn.Module) -> list[nn.GELU]:
    return [layer for layer in model.modules() if isinstance(layer, nn.GELU) and layer.approximate == "none"]
