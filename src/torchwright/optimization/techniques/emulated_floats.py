"""NVFP4, MXFP8 and MXFP4 on any device: what they lose, without what they gain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.core.errors import RefusedTechnique
from torchwright.core.layer_types import deviation, overridden
from torchwright.optimization.techniques.base import Phase, Target
from torchwright.optimization.techniques.shared.block_floats import BLOCKS, Format, round_blocks
from torchwright.optimization.techniques.shared.for_parts import ForParts
from torchwright.optimization.techniques.shared.wrapping import (
    known_names,
    named,
    plain_name,
    replace_module,
    stand_in_error,
)

EPSILONS: dict[Format, float] = {"nvfp4": 2.0**-2, "mxfp4": 2.0**-2, "mxfp8": 2.0**-4}
"""`Technique.epsilon`: half of the last bit that is kept."""


@dataclass(frozen=True, kw_only=True)
class EmulatedFloats(ForParts):
    """Compute linear layers in a format of later cards, emulated: slower here, with the accuracy to expect there."""

    name: ClassVar[str] = "emulated_floats"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    needs: ClassVar[frozenset[str]] = frozenset({"linear", "float_weights"})
    removes: ClassVar[frozenset[str]] = frozenset({"float_weights"})
    tolerance: ClassVar[float] = 0.25

    format: Format = "mxfp8"
    """Weights and inputs: 4-bit floats by blocks of 16 with two scales (nvfp4) or by blocks of 32 (mxfp4), or 8-bit
    floats by blocks of 32 (mxfp8). Their speed needs tensor cores of compute capability 10.0."""
    skip: tuple[str, ...] = ()
    """Names of linear layers that stay as they are."""

    def variants(self, target: Target) -> Iterable[Self]:
        return ()  # it is slower everywhere: only a user who names it wants to know its accuracy

    @property
    def epsilon(self) -> float:
        return EPSILONS[self.format]

    def refuse(self, target: Target) -> str | None:
        return super().refuse(target) or self.lacks(target, nn.Linear)

    def apply(self, target: Target) -> None:
        layers = {name: layer for name, layer in named(target.model, nn.Linear) if self.covers(name)}
        asked = known_names(
            f"{self.name}:skip", self.skip, (name for name, _ in named(target.model, nn.Linear))
        )
        skipped = {name: "left alone by option" for name in layers if name in asked}
        for name, layer in layers.items():
            reason = skipped.get(name) or deviation(layer, (nn.Linear,)) or self._shape_fault(layer)
            if reason:
                skipped[name] = reason
            else:
                replace_module(target.model, layer, EmulatedLinear(layer, self.format))
        if len(skipped) == len(layers):
            raise RefusedTechnique(
                f"{self.name} changes nothing", found="; ".join(sorted(set(skipped.values())))
            )
        kernel = f"{self.format}, emulated: for its accuracy only"
        self.cover(target, len(layers), unit="linear layers", kernel=kernel, skipped=skipped)

    def module_error(self, module: nn.Module, x: torch.Tensor) -> float | None:
        return stand_in_error(module, self.stand_in(module), x)

    def stand_in(self, module: nn.Module) -> nn.Module | None:
        layer: Any = module
        if overridden(layer, (nn.Linear,)) or self._shape_fault(layer):
            return None
        return EmulatedLinear(layer, self.format)

    def retreat(self, names: tuple[str, ...]) -> Self:
        return replace(self, skip=tuple(sorted({*self.skip, *map(plain_name, names)})))

    def _shape_fault(self, layer: nn.Linear) -> str | None:
        block = BLOCKS[self.format]
        if layer.in_features % block:
            return f"{layer.in_features} inputs are not a multiple of the block of {block}"
        return None


class EmulatedLinear(nn.Module):
    """A linear layer whose weight and input are rounded to a format of block floats; sums stay in the input's type."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, layer: nn.Linear, format: Format) -> None:
        super().__init__()
        self.format: Format = format
        self.register_buffer("weight", round_blocks(layer.weight.detach(), format))
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(round_blocks(input, self.format), self.weight, self.bias)

    def extra_repr(self) -> str:
        return (
            f"out_features={self.weight.shape[0]}, in_features={self.weight.shape[1]}, format={self.format}"
        )
