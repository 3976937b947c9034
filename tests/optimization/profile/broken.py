"""Modules at one known line of which a graph breaks: the line with `# here`."""

from __future__ import annotations

import contextlib
import time
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

X = torch.linspace(-1, 1, 16).reshape(4, 4)


class Print(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        print("on the way")  # here
        return y.cos()


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        if y.sum() > 0:  # here
            return y + 1
        return y - 1


class Item(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        largest = y.max().item()  # here
        return y / largest


class Listed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        values = y[0].tolist()  # here
        return y / values[-1]


class Numpy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        noise = np.random.default_rng(0)  # here
        return y * (1 if noise else 0)


class Chosen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return y[y > 0].sum()  # here


class Asleep(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        time.sleep(0.001)  # here
        return y.cos()


class Warned(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        warnings.warn("odd", stacklevel=1)  # here
        return y.cos()


class ByHand(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        z = self.apart(y)  # here
        return z.cos()

    @torch.compiler.disable
    def apart(self, y: torch.Tensor) -> torch.Tensor:
        return y * 2


class Within(nn.Module):
    """A break that Dynamo cannot go on behind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        largest: Any = 1.0
        with contextlib.suppress(ValueError):
            try:
                largest = y.max().item()  # here
            except KeyError:
                largest = 2.0
        return y / largest


class Rotary(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(x.reshape(4, 2, 2))  # here
        angles = torch.polar(torch.ones(2), torch.arange(2.0))
        return torch.view_as_real(turned * angles).flatten(1)


class Whole(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.tanh(x.sin().numpy())).cos()
