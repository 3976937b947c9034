"""1x1 convolutions as matrix products over the channels.

torch prepares oneDNN's convolution anew at every call (22 us on an AMX machine), a matrix product it just calls; small
nets have more of the one than of arithmetic. As linear layers they are also what the 8-bit and packed kernels take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from torchwright.core.layer_types import deviation
from torchwright.core.records import DeviceFacts
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.batchnorm import fold
from torchwright.optimization.techniques.shared.wrapping import linear_of, named, replace_where


@dataclass(frozen=True, kw_only=True)
class PointwiseLinear(Technique):
    """1x1 convolutions as linear layers, whose call costs less; batch norms are folded first."""

    name: ClassVar[str] = "pointwise_linear"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"convolution", "eager", "float32"})
    gives: ClassVar[frozenset[str]] = frozenset({"linear"})

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return (
            None
            if device.kind == "cpu"
            else "a convolution's call costs no more than a matrix product's there"
        )

    def refuse(self, target: Target) -> str | None:
        if any(_reason(layer) is None for _, layer in named(target.model, nn.Conv2d)):
            return None
        return "the model has no 2-D convolution of one pixel, stride 1 and one group"

    def apply(self, target: Target) -> None:
        if "batch_norm" in target.properties:
            # The compiler folds them into convolutions only.
            fold(target.model, target.workload.cases(target.compute_dtype))
        found = list(named(target.model, nn.Conv2d))
        left = replace_where(target.model, found, _reason, Pointwise)
        self.cover(target, len(found), unit="2-D convolutions", kernel="matrix products", skipped=left)


class Pointwise(nn.Module):
    """A 1x1 convolution as a linear layer; without a copy where the channels lie side by side."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.linear = linear_of(layer.weight.flatten(1), layer.bias)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as the convolution had it: models read its type."""
        return self.linear.weight[:, :, None, None]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.linear(input.movedim(-3, -1)).movedim(-1, -3)


def _reason(layer: Any) -> str | None:
    """Return why a convolution is not a linear layer over its channels, or cannot be replaced by one."""
    if layer.kernel_size != (1, 1):
        return f"its window is {layer.kernel_size[0]} x {layer.kernel_size[1]}"
    if layer.stride != (1, 1) or layer.groups != 1 or layer.padding not in ((0, 0), "same", "valid"):
        return "it has a stride, a padding or groups"
    return deviation(layer, (nn.Conv2d,))
