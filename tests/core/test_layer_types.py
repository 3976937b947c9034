"""A subclass is its base class only where it computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from torchwright.core.layer_types import computes_as, deviation

KINDS = (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.MultiheadAttention, nn.Embedding, nn.LayerNorm)


class Renamed(nn.Linear):
    """Another constructor and another description, and no other forward."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def extra_repr(self) -> str:
        return "square"

    def share_of_zeros(self) -> float:
        return float((self.weight == 0).float().mean())


class Activated(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


class HookOfConvolution(nn.Conv2d):
    def _conv_forward(self, input: Any, weight: Any, bias: Any) -> torch.Tensor:
        return super()._conv_forward(input, weight - weight.mean(), bias)


class HookOfCall(nn.Linear):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 2


class PaddingOnTheFly(nn.Conv2d):
    @property  # type: ignore[override]
    def padding(self) -> Any:
        return self.kernel_size[0] // 2, self.kernel_size[1] // 2

    @padding.setter
    def padding(self, given: Any) -> None:
        pass


class LaterSubclass(Activated):
    pass


def with_forward() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = lambda input: input  # type: ignore[method-assign]
    return layer


def with_hook(register: str) -> nn.Module:
    layer = nn.Linear(4, 4)
    getattr(layer, register)(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    "module",
    [nn.Linear(4, 4), Renamed(4), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.MultiheadAttention(4, 2)],
)
def test_torchs_layers_and_subclasses_without_a_forward_of_their_own(module: nn.Module) -> None:
    assert computes_as(module, KINDS)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Activated(4, 4), "its own forward"),
        (lambda: LaterSubclass(4, 4), "its own forward"),
        (lambda: HookOfConvolution(3, 3, 1), "its own _conv_forward"),
        (lambda: HookOfCall(4, 4), "its own __call__"),
        (lambda: PaddingOnTheFly(3, 3, 1), "its own padding"),
        (with_forward, "its forward is not its class's"),
        (lambda: with_hook("register_forward_hook"), "a hook"),
        (lambda: with_hook("register_forward_pre_hook"), "a hook"),
        (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "a parametrization"),
        (lambda: parametrizations.spectral_norm(nn.Conv2d(3, 3, 1)), "a parametrization"),
        (lambda: nn.utils.weight_norm(nn.Linear(4, 4)), "a hook"),
        (lambda: nn.MultiheadAttention(4, 2).out_proj, "read by its owner"),
        (lambda: nn.SyncBatchNorm(3), "none of Linear"),
        (lambda: nn.ReLU(), "none of Linear"),
    ],
)
def test_what_computes_something_else_says_why(make: Any, says: str) -> None:
    reason = deviation(make(), KINDS)
    assert reason is not None
    assert says in reason
    assert not computes_as(make(), KINDS)
