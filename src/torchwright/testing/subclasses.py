"""Small models whose layers are subclasses of torch's that compute more, or have something attached to them.

A rewrite by `isinstance` gets each of them wrong. The subclasses are those that model libraries have: a batch norm with
its activation, a convolution that standardizes its weight or pads by itself, a norm over the channels of an image.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations


class NormAndActivation(nn.BatchNorm2d):
    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.act = nn.SiLU(inplace=True)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return self.act(y)


class NormBesideItsInput(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + super().forward(input)


class ScaledNorm(nn.BatchNorm2d):
    """Calls the same function as its base with other values."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        return F.batch_norm(
            input, self.running_mean, self.running_var, 2 * self.weight, self.bias, eps=self.eps
        )


class StandardizedConv(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = self.weight.view(self.out_channels, -1)
        rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)
        weight = rows.view(self.weight.shape)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class PaddedConv(nn.Conv2d):
    """One pixel more on the far side, as TensorFlow pads."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(input, (0, 1, 0, 1)))[..., :-1, :-1]


class ActivatedConv(nn.Conv2d):
    def _conv_forward(self, input: Any, weight: Any, bias: Any) -> torch.Tensor:
        return super()._conv_forward(input, weight, bias).sigmoid()


class ActivatedLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).tanh()


class CosineLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(F.normalize(input, dim=-1), F.normalize(self.weight, dim=-1), self.bias)


class LinearOfTwo(nn.Linear):
    """Has another signature."""

    def forward(self, input: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        y = super().forward(input)
        return y * (y.sigmoid() if gate is None else gate)


class ChannelNorm(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Net(nn.Module):
    """Convolutions, norms and linear layers of given classes, each next to one of torch's own."""

    def __init__(self, conv: Any = nn.Conv2d, norm: Any = nn.BatchNorm2d, linear: Any = nn.Linear) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 16, 3, padding=1, bias=False), norm(16))
        self.own = nn.Sequential(nn.Conv2d(16, 64, 1), norm(64), nn.ReLU())
        self.point = nn.Sequential(conv(64, 64, 1), nn.BatchNorm2d(64))
        self.first, self.second, self.head = linear(64, 64), nn.Linear(64, 64), linear(64, 16)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y_BE = self.point(self.own(self.stem(x_BCHW))).mean((2, 3))
        return self.head(F.gelu(self.second(self.first(y_BE))))


def _with(change: Callable[[Any, Any], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Net()
        with torch.no_grad(), warnings.catch_warnings():  # with gradients a hook's weight could not be copied
            warnings.simplefilter("ignore")  # the older weight norm is deprecated, and in use
            for layer in (model.stem[0], model.stem[1], model.point[0], model.first, model.head):
                change(layer, isinstance(layer, nn.BatchNorm2d))
        return model

    return build


def _weight_norm(layer: Any, is_norm: bool) -> None:
    if not is_norm:
        parametrizations.weight_norm(layer)


def _spectral_norm(layer: Any, is_norm: bool) -> None:
    if not is_norm:
        parametrizations.spectral_norm(layer)


def _weight_norm_by_hook(layer: Any, is_norm: bool) -> None:
    if not is_norm:
        nn.utils.weight_norm(layer)


def _hook(layer: Any, is_norm: bool) -> None:
    layer.register_forward_hook(lambda module, args, output: output.relu() + 1)


def _pre_hook(layer: Any, is_norm: bool) -> None:
    layer.register_forward_pre_hook(lambda module, args: (2 * args[0] + 1,))


class _Doubled:
    """A forward of one layer's own, which a copy of the layer copies."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * type(self.layer).forward(self.layer, input)


def _own_forward(layer: Any, is_norm: bool) -> None:
    object.__setattr__(layer, "forward", _Doubled(layer))


SUBCLASSES: dict[str, Callable[[], nn.Module]] = {
    "norm with activation": lambda: Net(norm=NormAndActivation),
    "norm beside its input": lambda: Net(norm=NormBesideItsInput),
    "norm of other values": lambda: Net(norm=ScaledNorm),
    "standardized weight": lambda: Net(conv=StandardizedConv),
    "padded": lambda: Net(conv=PaddedConv),
    "activated convolution": lambda: Net(conv=ActivatedConv),
    "activated linear": lambda: Net(linear=ActivatedLinear),
    "cosine": lambda: Net(linear=CosineLinear),
    "another signature": lambda: Net(linear=LinearOfTwo),
    "norm of channels": lambda: Net(norm=ChannelNorm),
    "weight norm": _with(_weight_norm),
    "weight norm by hook": _with(_weight_norm_by_hook),
    "spectral norm": _with(_spectral_norm),
    "hooks": _with(_hook),
    "hooks before": _with(_pre_hook),
    "own forward": _with(_own_forward),
}
"""Name → how to build the model."""


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 3, 16, 16),)
