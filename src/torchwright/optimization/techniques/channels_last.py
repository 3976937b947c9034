"""The memory format of images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn

from torchwright.core import nested
from torchwright.core.layer_types import overridden
from torchwright.optimization.techniques.base import Phase, Target
from torchwright.optimization.techniques.shared.for_parts import ForParts
from torchwright.optimization.techniques.shared.wrapping import named

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


@dataclass(frozen=True, kw_only=True)
class ChannelsLast(ForParts):
    """Keep the channels of an image side by side in memory, as the convolution kernels want them."""

    name: ClassVar[str] = "channels_last"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"convolution"})

    def variants(self, target: Target) -> Iterable[Self]:
        return self.by_parts(target)

    def refuse(self, target: Target) -> str | None:
        if fault := super().refuse(target):
            return fault
        layers = [layer for name, layer in named(target.model, CONVOLUTIONS) if self.covers(name)]
        if all(overridden(layer, CONVOLUTIONS) for layer in layers):
            return f"{', '.join(self.parts) or 'the model'} has no 2-D convolution of torch's own class"
        leaves = [
            nested.leaves((case.args, case.kwargs))
            for case in target.workload.cases(target.compute_dtype)
            if not self.parts or case.part in self.parts
        ]
        if not any(_is_image(leaf) for case in leaves for leaf in case):
            return "no input is a 4-D tensor of numbers (batch, channels, height, width)"
        return None

    def apply(self, target: Target) -> None:
        found = [(name, layer) for name, layer in named(target.model, CONVOLUTIONS) if self.covers(name)]
        # A subclass's forward may view its weight as it lies.
        skipped = {name: why for name, layer in found if (why := overridden(layer, CONVOLUTIONS))}
        for name, layer in found:
            if name not in skipped:
                layer.to(memory_format=torch.channels_last)
        if not self.parts:  # a component's first convolution turns what it is given
            target.model = ChannelsLastInputs(target.model)
        self.cover(target, len(found), unit="2-D convolutions", kernel="channels-last", skipped=skipped)


class ChannelsLastInputs(nn.Module):
    """Turns 4-D floating-point inputs to channels-last on their way in; their values and shapes stay."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = nested.map_leaves(_channels_last, (args, kwargs))
        return self.inner(*args, **kwargs)


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point()


def _channels_last(value: Any) -> Any:
    return value.contiguous(memory_format=torch.channels_last) if _is_image(value) else value
